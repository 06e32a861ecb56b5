"""Sources and exports end to end: a version holds what its source holds, and what was exported comes back."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from datasvc.repository import Repository
from datasvc.shards import ingest, open_dataset
from datasvc.shards.export import export
from datasvc.shards.format.schema import HEIGHT, IMAGE, KEY, WIDTH
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.versions.diff import diff
from datasvc.shards.versions.keys import SplitKeys
from tests.shards.export.contents import ODD_KEYS, write_photos
from tools.example_sources import contents as examples_of
from tools.example_sources import image_files, messages, tables, tars
from tools.example_sources.arrays import END_OF_TEXT, paragraphs

ROOT = Path(__file__).parents[2]
NUM_IMAGES = 100
SPLITS = ("train", "val")
CLASSES = tuple(sorted(examples_of.NAMES))
SYNSETS = tuple(sorted(tars.SYNSETS))
OPTIONS = {
    "parquet": {"key": "id"},
    "arrow": {"key": "id"},
    "csv": {"key": "id"},
    "tfrecord": {"key": "image/filename"},
    "text": {"tokenizer": "tokenizer.json", "block_tokens": 128},
    "text-lines": {"tokenizer": "tokenizer.json", "block_tokens": 128},
}
MANIFESTS = ("csv", "jsonl", "parquet")
# What has images and labels, and nothing else; what has images alone.
LABELLED = ("folder", "imagenet", "huggingface", "huggingface-hub", "lmdb", "lmdb-pixels", "recordio")
UNLABELLED = ("flat", "lmdb-plain")


@pytest.fixture(scope="module")
def contents():
    return examples_of.read_contents(NUM_IMAGES, seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("sources") / "examples"
    program = [sys.executable, ROOT / "tools" / "make_sources.py", made, "--images", str(NUM_IMAGES)]
    subprocess.run(program, check=True, capture_output=True)
    return made


@pytest.fixture(scope="module")
def versions(folder, tmp_path_factory):
    """A repository with a data set of each example, in several shards where there is enough for it."""
    repository = Repository.create(str(tmp_path_factory.mktemp("round") / "repo"))
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name != "manifest":
            options = dict(OPTIONS.get(path.name, {}))
            if "tokenizer" in options:
                options["tokenizer"] = str(folder / options["tokenizer"])
            ingest(repository, str(path), path.name, source_options=SourceOptions(**options), shard_bytes=40_000)
    for extension in MANIFESTS:
        options = SourceOptions(manifest=str(folder / "manifest" / f"digits.{extension}"))
        ingest(repository, str(folder / "manifest" / "images"), f"manifest-{extension}", source_options=options)
    return repository


def by_split(contents, describe, splits=SPLITS):
    """Return by split and key what `describe` gives for each digit: its key and its columns."""
    return {
        split: dict(describe(digit, row) for row, digit in enumerate(contents.digits_of(held)))
        for split, held in zip(splits, SPLITS, strict=True)
    }


def images(contents, key, label=lambda digit: digit.label, splits=SPLITS, **columns):
    return by_split(
        contents,
        lambda digit, row: (
            key(digit, row),
            {"image": digit.jpeg, "label": label(digit), **{name: of(digit) for name, of in columns.items()}},
        ),
        splits,
    )


def class_label(digit):
    return CLASSES.index(digit.name)


def synset_label(digit):
    return SYNSETS.index(tars.SYNSETS[digit.label])


def imagenet_key(digit, row):
    synset = tars.SYNSETS[digit.label]
    if digit.split == "val":
        return f"ILSVRC2012_val_{row + 1:08d}.JPEG"
    return f"{synset}/{synset}_{digit.number}.JPEG"


def table_columns(digit):
    row = tables.digit_row(digit)
    return str(row.pop("id")), row


def hub_key(digit, row):
    split = "train" if digit.split == "train" else "validation"
    return f"data/{split}-00000-of-00001.parquet#{row}"


def saved_key(digit, row):
    split = "train" if digit.split == "train" else "validation"
    return f"{split}/data-00000-of-00001.arrow#{row}"


def numbered(digit, row):
    return f"{digit.number:04d}"


def named(digit, row):
    return f"{digit.number:04d}.jpg"


def levels(digit):
    return digit.levels.reshape(-1).tolist()


def mds_key(digit, row):
    return f"{digit.split}/shard.{row // 40:05d}.mds#{row % 40}"


def caffe_images(contents):
    return images(contents, lambda digit, row: messages.caffe_key(digit))


def manifest_images(contents):
    described = {name: lambda digit, name=name: image_files.manifest_row(digit)[name] for name in ("number", "ink")}
    return images(contents, named, class_label, **described)


def irises(contents, row):
    found = {split: [row(iris) for iris in contents.irises_of(split)] for split in SPLITS}
    return {
        split: {each.pop("id" if "id" in each else "key"): each for each in rows} for split, rows in found.items()
    }


WRITTEN = {
    "folder": lambda made: images(made, lambda digit, row: f"{digit.name}/{digit.number:04d}.jpg", class_label),
    "flat": lambda made: {"train": {name: {"image": photo} for name, photo in made.photos.items()}},
    **{f"manifest-{extension}": manifest_images for extension in MANIFESTS},
    "imagenet": lambda made: images(made, imagenet_key, synset_label),
    "webdataset": lambda made: images(made, numbered, json=tars.described),
    "webdataset-compressed": lambda made: images(made, numbered, json=tars.described),
    "parquet": lambda made: by_split(made, lambda digit, row: table_columns(digit)),
    "arrow": lambda made: by_split(made, lambda digit, row: table_columns(digit)),
    "csv": lambda made: irises(made, tables.iris_row),
    "json-lines": lambda made: irises(made, tables.iris_object),
    "huggingface": lambda made: images(made, saved_key, splits=("train", "validation")),
    "huggingface-hub": lambda made: images(made, hub_key, splits=("train", "validation")),
    "lmdb": caffe_images,
    "lmdb-plain": lambda made: {"train": {numbered(digit, 0): {"image": digit.jpeg} for digit in made.digits}},
    "tfrecord": lambda made: images(
        made,
        named,
        ink=lambda digit: digit.levels.mean(axis=0).astype(np.float32).tolist(),
        **{"image/class/text": lambda digit: digit.name},
    ),
    "recordio": lambda made: images(made, lambda digit, row: f"{digit.number}"),
    "mds": lambda made: images(made, mds_key, levels=levels, name=lambda digit: digit.name),
    "npy": lambda made: by_split(
        made,
        lambda digit, row: (f"{digit.split}_images.npy#{row}", {"images": levels(digit), "label": digit.label}),
    ),
    "npz": lambda made: by_split(
        made,
        lambda digit, row: (f"digits.npz#{row}", {"x": levels(digit), "label": digit.label}),
        ("train", "test"),
    ),
}
NAMED = {
    **dict.fromkeys(("folder", *(f"manifest-{extension}" for extension in MANIFESTS)), CLASSES),
    "imagenet": SYNSETS,
    **dict.fromkeys(("huggingface", "huggingface-hub"), examples_of.NAMES),
}


def given(sample):
    """Return the columns of a sample that somebody gave it."""
    measured = {KEY, WIDTH, HEIGHT} if IMAGE in sample else {KEY}
    return {name: value for name, value in sample.items() if name not in measured}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_version_holds_what_its_source_holds(versions, contents, name):
    dataset = open_dataset(versions, name)
    assert {split: {sample[KEY]: given(sample) for sample in dataset[split]} for split in dataset} == WRITTEN[name](
        contents
    )
    assert [split.classes for split in dataset.values()] == [NAMED.get(name, ())] * len(dataset)


def test_pixels_in_a_datum_are_the_pixels_of_the_image(versions, contents):
    found = {sample[KEY]: sample for sample in open_dataset(versions, "lmdb-pixels")["train"]}
    written = {messages.caffe_key(digit): digit for digit in contents.digits_of("train")}
    assert found.keys() == written.keys()
    for key, digit in written.items():
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(found[key]["image"]))), digit.pixels)
        assert found[key]["label"] == digit.label


@pytest.mark.parametrize(("name", "cut"), [("text", lambda text: [text]), ("text-lines", paragraphs)])
def test_token_blocks_hold_the_texts_whole_and_apart(versions, folder, contents, name, cut):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for split in SPLITS:
        samples = sorted(open_dataset(versions, name)[split], key=lambda sample: int(sample[KEY].rpartition("#")[2]))
        tokens = [token for sample in samples for token in sample["tokens"][: sample["length"]]]
        starts = [
            128 * number + start for number, sample in enumerate(samples) for start in sample["document_starts"]
        ]
        found = [
            tokenizer.decode(tokens[start:stop], skip_special_tokens=False)
            for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True)
        ]
        texts = [text for title, text in contents.texts.items() if (title == "wine") == (split == "val")]
        assert found == [f"{document}{END_OF_TEXT}" for text in texts for document in cut(text)]


HELD = [
    *[("parquet", name) for name in (*WRITTEN, "lmdb-pixels", "text", "text-lines")],
    *[("webdataset", name) for name in (*LABELLED, *UNLABELLED)],
    *[("mds", name) for name in (*LABELLED, *UNLABELLED, "webdataset", "csv", "mds", "npy", "npz", "manifest-csv")],
    *[("lmdb", name) for name in LABELLED],
    *[("folder", name) for name in ("folder", "flat")],
    *[("tfrecord", name) for name in (*LABELLED, *UNLABELLED, "webdataset", "tfrecord", "mds", "npy", "npz")],
    ("tfrecord", "text-lines"),
    ("mxnet", "recordio"),
]


def digests(dataset, key=str):
    """Return by split and key the digest that the sample index has of each sample."""
    objects = dataset.repository.objects
    found = {}
    for name, split in dataset.items():
        shards = list(SplitKeys(objects, split.table))
        keys = [key(each) for shard in shards for each in shard.keys.to_pylist()]
        values = [digest for shard in shards for digest in shard.read_digests().to_pylist()]
        found[name] = dict(zip(keys, values, strict=True))
        assert len(found[name]) == len(split)
    return found


def exported(versions, name, export_format, destination):
    export(versions, name, str(destination), export_format)
    return open_dataset(versions, name)


@pytest.mark.parametrize(("export_format", "name"), HELD, ids=str)
def test_what_was_exported_comes_back(versions, tmp_path, export_format, name):
    dataset = exported(versions, name, export_format, tmp_path / "out")
    again = Repository.create(str(tmp_path / "again"))
    # Keys that were made of file and row are equal in both splits, and what was exported has them as its own.
    ingest(again, str(tmp_path / "out"), name, on_split_overlap="keep" if name == "npz" else "fail")
    found = open_dataset(again, name)
    # LMDB keeps keys in order, so ours follow their number there.
    assert digests(found, (lambda key: key[9:]) if export_format == "lmdb" else str) == digests(dataset)
    if export_format in {"parquet", "folder"}:
        assert [split.classes for split in found.values()] == [split.classes for split in dataset.values()]


@pytest.mark.parametrize("export_format", ["webdataset", "parquet", "mds", "tfrecord"])
def test_keys_that_no_file_can_have_come_back(repository, tmp_path, export_format):
    dataset = write_photos(repository, ODD_KEYS, shards=5)
    exported(repository, "photos", export_format, tmp_path / "out")
    ingest(repository, str(tmp_path / "out"), "again")
    assert digests(open_dataset(repository, "again")) == digests(dataset)


@pytest.mark.slow
def test_shards_of_a_single_sample_hold_what_large_ones_hold(versions, folder, repository):
    ingest(repository, str(folder / "json-lines"), "json-lines", shard_bytes=1)
    tiny = open_dataset(repository, "json-lines")
    assert [split.table.num_shards for split in tiny.values()] == [len(split) for split in tiny.values()]
    assert digests(tiny) == digests(open_dataset(versions, "json-lines"))


@pytest.mark.parametrize(
    "name", ["manifest-csv", "imagenet", "parquet", "tfrecord", "mds", "webdataset", "lmdb-plain"]
)
def test_a_folder_comes_back_by_its_metadata_split_by_split(versions, tmp_path, name):
    dataset = exported(versions, name, "folder", tmp_path / "out")
    again = Repository.create(str(tmp_path / "again"))
    for split in dataset:
        metadata = tmp_path / "out" / split / "metadata.jsonl"
        if metadata.exists():
            options = SourceOptions(manifest=str(metadata), split=split)
        else:
            options = SourceOptions(split=split)
        ingest(again, str(tmp_path / "out" / split), name, source_options=options, append=True)
    found = open_dataset(again, name)
    assert digests(found) == digests(dataset)
    assert [split.classes for split in found.values()] == [split.classes for split in dataset.values()]


def test_labels_in_another_order_of_classes_mean_the_same(versions, tmp_path):
    """Folders have no order but the alphabet's; a difference is told by names."""
    dataset = exported(versions, "huggingface", "folder", tmp_path / "out")
    for split in dataset:
        options = SourceOptions(manifest=str(tmp_path / "out" / split / "metadata.jsonl"), split=split)
        ingest(versions, str(tmp_path / "out" / split), "sorted", source_options=options, append=True)
    for each in diff(versions, "huggingface", "sorted").splits.values():
        assert (len(each.added), len(each.deleted), len(each.changed)) == (0, 0, 0)
        assert each.unchanged


def test_json_in_tars_comes_back_as_text_that_holds_the_columns(versions, tmp_path):
    dataset = exported(versions, "parquet", "webdataset", tmp_path / "out")
    ingest(versions, str(tmp_path / "out"), "from-tars")
    found = {sample[KEY]: sample for sample in open_dataset(versions, "from-tars")["train"]}
    assert found.keys() == {sample[KEY] for sample in dataset["train"]}
    for sample in dataset["train"]:
        other = found[sample[KEY]]
        assert {**given(other), **json.loads(other["json"])} == {**given(sample), "json": other["json"]}


def test_lists_of_no_fixed_length_come_back_from_mds_beside_their_shapes(versions, tmp_path):
    dataset = exported(versions, "tfrecord", "mds", tmp_path / "out")
    ingest(versions, str(tmp_path / "out"), "from-mds")
    found = {sample[KEY]: sample for sample in open_dataset(versions, "from-mds")["train"]}
    for sample in dataset["train"]:
        assert given(found[sample[KEY]]) == {**given(sample), "ink.shape": [8]}


def test_a_datum_without_a_label_comes_back_with_label_0_as_caffe_reads_it(versions, tmp_path):
    dataset = exported(versions, "flat", "lmdb", tmp_path / "out")
    ingest(versions, str(tmp_path / "out"), "from-lmdb")
    found = {sample[KEY][9:]: sample for sample in open_dataset(versions, "from-lmdb")["train"]}
    assert {key: given(sample) for key, sample in found.items()} == {
        sample[KEY]: {**given(sample), "label": 0} for sample in dataset["train"]
    }
