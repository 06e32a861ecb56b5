"""Labels that are integers without names train, whatever kind of source they came from; names can follow."""

import io
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import datasvc
from datasvc.errors import ConfigError, ConflictError
from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from datasvc.shards.export import export
from datasvc.shards.history.rename import name_classes
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.tasks.classification import Classification
from datasvc.trainer.recipes.train import train
from tests.samples import jpeg

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_CLASSES = 3
CONFIG = TrainConfig(data="d", repo="r", name="m")


def samples(num_samples=12, first=0):
    return [
        {"key": f"k{number}", "image": jpeg(seed=number), "label": number % NUM_CLASSES}
        for number in range(first, first + num_samples)
    ]


def write_webdataset(folder):
    with tarfile.open(folder / "train-000.tar", "w") as packed:
        for sample in samples():
            for suffix, content in (("jpg", sample["image"]), ("cls", b"%d" % sample["label"])):
                member = tarfile.TarInfo(f"{sample['key']}.{suffix}")
                member.size = len(content)
                packed.addfile(member, io.BytesIO(content))
    return str(folder)


def write_parquet(folder):
    pq.write_table(pa.Table.from_pylist(samples()), folder / "train.parquet")
    return str(folder)


def write_arrow(folder):
    table = pa.Table.from_pylist(samples())
    with pa.ipc.new_file(str(folder / "train.arrow"), table.schema) as file:
        file.write_table(table)
    return str(folder)


def write_manifest(folder):
    for sample in samples():
        (folder / f"{sample['key']}.jpg").write_bytes(sample["image"])
    lines = ["file,label", *(f"{sample['key']}.jpg,{sample['label']}" for sample in samples())]
    manifest = folder.parent / f"{folder.name}.csv"
    manifest.write_text("\n".join(lines) + "\n")
    return str(folder), {"manifest": str(manifest)}


def exported(format):  # noqa: A002 - what it is called everywhere
    def write(folder):
        repository = Repository.create("memory://integer-labels-" + format)
        ingest(repository, samples(), "made")
        export(repository, "made", str(folder / "out"), format)
        return str(folder / "out")

    return write


SOURCES = {
    "python": lambda _folder: samples(),
    "webdataset": write_webdataset,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "manifest": write_manifest,
    "tfrecord": exported("tfrecord"),
    "mds": exported("mds"),
    "lmdb": exported("lmdb"),
    "mxnet": exported("mxnet"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_integer_labels_of_every_kind_of_source_train(repository, tmp_path, kind):
    (tmp_path / "source").mkdir()
    source = SOURCES[kind](tmp_path / "source")
    source, options = source if isinstance(source, tuple) else (source, None)
    from datasvc.shards.sources import SourceOptions

    ingest(repository, source, "made", source_options=options and SourceOptions(**options))
    train(
        TrainConfig(repo=repository.url, data="made", name="m", size=16, flip=0.0, batch_size=4, epochs=1, cache=None)
    )
    weights = datasvc.open(repository.url).models.restore("m").state["model"]
    assert list(weights.values())[-1].shape == (NUM_CLASSES,)


def labels_of(repository, labels, name="odd"):
    made = [{"key": f"k{n}", "image": jpeg(seed=n), "label": label} for n, label in enumerate(labels)]
    ingest(repository, made, name)
    return open_dataset(repository, name)["train"]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, -1], r"1 samples of .* have labels outside 0\.\.1, such as -1: delete them"),
        ([0, 1, 10**9], r"go up to 1000000000, .*renumber them from 0"),
        ([0, 1, None], r"1 samples of .* have no label: delete them .*label is null"),
        ([None, None], r"not counted: there are none"),
    ],
)
def test_labels_that_are_no_classes_are_named(repository, labels, message):
    schema = pa.schema([("key", pa.string()), ("image", pa.binary()), ("label", pa.int32())])
    made = [{"key": f"k{n}", "image": jpeg(seed=n), "label": label} for n, label in enumerate(labels)]
    folder = repository.storage.local_path("").parent / "odd"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(made, schema=schema), folder / "train.parquet")
    ingest(repository, str(folder), "odd")
    with pytest.raises(ConfigError, match=message):
        Classification(CONFIG, open_dataset(repository, "odd")["train"])


def test_a_label_that_only_validation_has_is_a_class_too(repository, tmp_path):
    for split, labels in (("train", [0, 1]), ("val", [0, 4])):
        made = [{"key": f"{split}{n}", "image": jpeg(seed=n + len(split) * 10), "label": n} for n in labels]
        pq.write_table(pa.Table.from_pylist(made), tmp_path / f"{split}.parquet")
    ingest(repository, str(tmp_path), "made")
    model = Classification(CONFIG, open_dataset(repository, "made")["train"]).build_model("small-cnn", {})
    assert list(model.parameters())[-1].shape == (5,)


def test_names_are_given_with_the_ingest_or_later_and_stay(repository):
    ingest(repository, samples(), "named", classes=["cat", "dog", "eel"])
    ingest(repository, samples(), "later")
    assert str(name_classes(repository, "later", ["cat", "dog", "eel"])) == "later@2"
    for name in ("named", "later"):
        split = open_dataset(repository, name)["train"]
        assert split.classes == ("cat", "dog", "eel")
        assert np.bincount([sample["label"] for sample in split]).tolist() == [4, 4, 4]
    assert open_dataset(repository, "later@1")["train"].classes == ()
    assert (
        open_dataset(repository, "later")["train"].table.shards()
        == open_dataset(repository, "later@1")["train"].table.shards()
    )
    with pytest.raises(ConfigError, match="already have names"):
        name_classes(repository, "later", ["dog", "cat", "eel"])
    name_classes(repository, "later", ["cat", "dog", "eel", "fly"])
    with pytest.raises(ConflictError, match="not the newest"):
        name_classes(repository, "later@1", ["cat", "dog", "eel"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["cat", "dog"], "up to 2, but there are only 2 class names"),
        (["a", "a", "b"], "two classes"),
        ([""], "none of them empty"),
    ],
)
def test_names_that_do_not_fit_the_labels_are_refused(repository, names, message):
    with pytest.raises(ConfigError, match=message):
        ingest(repository, samples(), "made", classes=names)


def test_labelled_and_unlabelled_samples_are_not_appended_to_each_other(repository):
    unlabelled = [{"key": f"u{number}", "image": jpeg(seed=50 + number)} for number in range(3)]
    ingest(repository, samples(), "labelled")
    ingest(repository, unlabelled, "unlabelled")
    with pytest.raises(ConfigError, match="the added data has no column 'label'"):
        ingest(repository, unlabelled, "labelled", append=True)
    with pytest.raises(ConfigError, match="the data set has no labels"):
        ingest(repository, samples(), "unlabelled", append=True)
