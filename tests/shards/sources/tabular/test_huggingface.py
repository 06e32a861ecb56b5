import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datasvc.errors import ConfigError, NotFoundError
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.tabular.huggingface import HuggingFaceSource
from tests.samples import jpeg
from tests.shards.sources.reading import read_all
from tests.shards.sources.source_laws import StreamedSourceLaws

# As `datasets` 4 writes it: features in `dataset_info.json` and in the schema, images as bytes and path.
FEATURES = {
    "image": {"_type": "Image"},
    "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
    "tags": {"feature": {"dtype": "string", "_type": "Value"}, "_type": "List"},
}
FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
STATE = {
    "_fingerprint": "ced2a9d745bbf7d6",
    "_format_columns": None,
    "_format_kwargs": {},
    "_output_all_columns": False,
}


def samples_of(start, count):
    return [
        {"image": jpeg(seed=number), "label": number % 2, "tags": ["a"] * (number % 3)}
        for number in range(start, start + count)
    ]


def table_of(samples, features=FEATURES):
    images = pa.array([{"bytes": sample["image"], "path": "x.jpg"} for sample in samples], FILE)
    table = pa.table(
        {
            "image": images,
            "label": pa.array([sample["label"] for sample in samples], pa.int64()),
            "tags": pa.array([sample["tags"] for sample in samples], pa.list_(pa.string())),
        }
    )
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return table.replace_schema_metadata(metadata if features else None)


def save(folder, shards, *, info=FEATURES, split=None, features=FEATURES):
    """Write a data set as `save_to_disk` does: Arrow streams, described by two files."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{number:05}-of-{len(shards):05}.arrow" for number in range(len(shards))]
    for name, samples in zip(names, shards, strict=True):
        table = table_of(samples, features)
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table, 2)
    state = {**STATE, "_data_files": [{"filename": name} for name in names], "_split": split}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"citation": "", "features": info}))
    return folder


def save_dict(folder, splits):
    for split, samples in splits.items():
        save(folder / split, [samples])
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder


def values(source):
    samples, bad = read_all(source)
    assert not bad
    return samples.drop(["key"]).to_pylist()


class TestHuggingFaceSource(StreamedSourceLaws):
    source = HuggingFaceSource
    column, key = "label", None

    def write(self, folder, numbers):
        features = {"label": {"names": [f"class{number}" for number in range(100)], "_type": "ClassLabel"}}
        samples = [{"image": jpeg(8, 8, seed=number), "label": number, "tags": ["a"]} for number in numbers]
        save(folder, [samples], info=features, features=features, split=folder.name)

    def write_splits(self, root, splits):
        super().write_splits(root, splits)
        (root / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))


def test_a_saved_data_set_of_splits_is_read(tmp_path):
    splits = {"train": samples_of(0, 5), "unsupervised": samples_of(5, 3)}
    folder = save_dict(tmp_path / "saved", splits)
    source = HuggingFaceSource.list(str(folder))
    assert source.classes == ("cat", "dog")
    assert source.schema.names == ["key", "image", "label", "tags"]
    assert source.schema.field("label").type == pa.int32()
    assert [part.split for part in source.parts] == ["train", "unsupervised"]
    assert values(source) == splits["train"] + splits["unsupervised"]
    assert not source.ignored


def test_a_saved_data_set_is_read_in_the_order_of_its_state(tmp_path):
    shards = [samples_of(0, 3), samples_of(3, 2)]
    folder = save(tmp_path / "saved", shards, split="validation")
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"].reverse()
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "cache-0123.arrow").write_bytes(b"left behind")
    source = HuggingFaceSource.list(str(folder))
    assert values(source) == shards[1] + shards[0]
    assert {part.split for part in source.parts} == {"validation"}
    assert source.ignored == {".arrow": 1}


def test_class_names_come_from_the_schema_where_the_description_has_none(tmp_path):
    folder = save(tmp_path / "saved", [samples_of(0, 2)], info=None)
    assert HuggingFaceSource.list(str(folder)).classes == ("cat", "dog")
    (folder / "dataset_info.json").unlink()
    assert HuggingFaceSource.list(str(folder)).classes == ("cat", "dog")


def test_class_names_come_from_the_description_where_the_schema_has_none(tmp_path):
    folder = save(tmp_path / "saved", [samples_of(0, 2)], features=None)
    assert HuggingFaceSource.list(str(folder)).classes == ("cat", "dog")


def test_a_folder_of_the_hub_is_read_by_the_splits_of_its_names(tmp_path):
    for name in ("train-00000-of-00002", "train-00001-of-00002", "unsupervised-00000-of-00001-0a1b2c3d", "test"):
        (tmp_path / "data").mkdir(exist_ok=True)
        pq.write_table(table_of(samples_of(0, 2)), tmp_path / "data" / f"{name}.parquet")
    (tmp_path / "README.md").write_text("---\n---\n")
    source = HuggingFaceSource.list(str(tmp_path))
    assert [part.split for part in source.parts] == ["test", "train", "train", "unsupervised"]
    assert source.classes == ("cat", "dog")
    assert values(source) == samples_of(0, 2) * 4
    assert source.ignored == {".md": 1}
    assert {part.split for part in HuggingFaceSource.list(str(tmp_path), SourceOptions(split="all")).parts} == {"all"}


def test_names_of_classes_may_be_numbered_as_cards_write_them(tmp_path):
    features = {"label": {"names": {"1": "dog", "0": "cat", "10": "owl"}, "_type": "ClassLabel"}}
    pq.write_table(table_of(samples_of(0, 2), features), tmp_path / "train.parquet")
    assert HuggingFaceSource.list(str(tmp_path)).classes == ("cat", "dog", "owl")


def test_names_of_classes_that_are_not_numbered_are_ignored(tmp_path):
    features = {"label": {"names": {"cat": 0, "dog": 1}, "_type": "ClassLabel"}}
    pq.write_table(table_of(samples_of(0, 2), features), tmp_path / "train.parquet")
    assert HuggingFaceSource.list(str(tmp_path)).classes == ()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_description_that_may_not_be_read_is_not_said_to_be_damaged(tmp_path):
    folder = save_dict(tmp_path / "saved", {"train": samples_of(0, 2)})
    (folder / "train/state.json").chmod(0)
    with pytest.raises(ConfigError, match="permission"):
        HuggingFaceSource.list(str(folder))


def test_of_several_columns_of_classes_the_first_is_the_label_unless_one_is_called_so(tmp_path):
    kinds = {name: {"names": [name], "_type": "ClassLabel"} for name in ("fine_label", "coarse_label", "labels")}
    for names, chosen in ((["fine_label", "coarse_label"], "fine_label"), (["fine_label", "labels"], "labels")):
        features = {name: kinds[name] for name in names}
        table = pa.table({name: [0] for name in names})
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        pq.write_table(table, tmp_path / "train.parquet")
        source = HuggingFaceSource.list(str(tmp_path))
        assert source.classes == (chosen,)
        assert source.schema.names == ["key", *("label" if name == chosen else name for name in names)]


def test_an_image_of_which_only_the_path_is_stored_is_a_bad_sample(tmp_path):
    table = table_of(samples_of(0, 2))
    images = pa.array([{"bytes": jpeg(seed=0), "path": None}, {"bytes": None, "path": "far/away.jpg"}], FILE)
    pq.write_table(table.set_column(0, "image", images), tmp_path / "train.parquet")
    samples, (bad,) = read_all(HuggingFaceSource.list(str(tmp_path)))
    assert samples.num_rows == 1
    assert bad.key == "train.parquet#1"
    assert "far/away.jpg" in bad.reason


def test_images_are_known_by_their_feature_also_where_the_first_is_not_there(tmp_path):
    table = table_of(samples_of(0, 2))
    images = pa.array([None, {"bytes": jpeg(seed=1), "path": None}], FILE)
    pq.write_table(table.set_column(0, "image", images), tmp_path / "train.parquet")
    source = HuggingFaceSource.list(str(tmp_path))
    assert source.schema.field("image").metadata
    assert [sample["image"] for sample in values(source)] == [None, jpeg(seed=1)]


def test_splits_that_differ_in_their_classes_are_refused(tmp_path):
    folder = save_dict(tmp_path / "saved", {"train": samples_of(0, 2), "test": samples_of(2, 2)})
    other = {**FEATURES, "label": {"names": ["dog", "cat"], "_type": "ClassLabel"}}
    save(folder / "test", [samples_of(2, 2)], info=other)
    with pytest.raises(ConfigError, match=r"test/dataset_info\.json and train/dataset_info\.json differ"):
        HuggingFaceSource.list(str(folder))


@pytest.mark.parametrize(
    ("break_it", "error", "message"),
    [
        (
            lambda folder: (folder / "train/data-00000-of-00001.arrow").unlink(),
            NotFoundError,
            r"lists \['data-00000-",
        ),
        (lambda folder: (folder / "train/state.json").unlink(), NotFoundError, r"train/state\.json is missing"),
        (lambda folder: (folder / "train/state.json").write_text("{"), ConfigError, r"train/state\.json is not JSON"),
        (lambda folder: (folder / "train/state.json").write_text("[]"), ConfigError, "not a JSON object"),
        (lambda folder: (folder / "train/state.json").write_text("{}"), ConfigError, "does not list its data files"),
        (lambda folder: (folder / "dataset_dict.json").write_text("{}"), ConfigError, "does not list its splits"),
        (
            lambda folder: (folder / "train/state.json").write_text(
                '{"_data_files": [{"filename": "../../x.arrow"}]}'
            ),
            NotFoundError,
            r"\.\./\.\./x\.arrow",
        ),
    ],
)
def test_a_folder_that_was_not_copied_whole_is_refused(tmp_path, break_it, error, message):
    folder = save_dict(tmp_path / "saved", {"train": samples_of(0, 2)})
    break_it(folder)
    with pytest.raises(error, match=message):
        HuggingFaceSource.list(str(folder))


def test_another_folder_is_not_taken_for_one(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(NotFoundError, match=r"expected state\.json.*found.*a\.txt"):
        HuggingFaceSource.list(str(tmp_path))
