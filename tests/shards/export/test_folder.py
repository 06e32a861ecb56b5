"""Folder exports, read by walking."""

import json

import pyarrow as pa
import pytest

from datasvc.errors import ConfigError
from datasvc.shards import open_dataset
from datasvc.shards.format.schema import image_schema, shard_schema
from tests.shards.export.contents import (
    CLASSES,
    KEY_FIELD,
    ODD_KEYS,
    digests,
    exported,
    files,
    photo,
    photos,
    version_digests,
    write_photos,
)
from tests.shards.export.export_laws import ExportLaws
from tests.shards.written_versions import write_version


def read(folder, split="train", classes=CLASSES):
    """Return the samples: files, what their folder says, and what the metadata say."""
    root = folder / split
    names = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.suffix != ".jsonl"]
    lines = (root / "metadata.jsonl").read_text("utf-8").splitlines() if (root / "metadata.jsonl").exists() else []
    described = {line.pop("file_name"): line for line in map(json.loads, lines)}
    assert not lines or described.keys() == set(names)
    samples = []
    for name in names:
        sample = {"key": name, "image": (root / name).read_bytes()}
        if classes:
            sample["label"] = name.partition("/")[0]
        sample |= described.get(name, {})
        if classes:
            sample["label"] = classes.index(sample["label"])
        samples.append(sample)
    return samples


def check(dataset, folder, split="train", classes=CLASSES):
    found = read(folder, split, classes)
    assert digests(found, dataset[split].table.sample_schema) == version_digests(dataset[split])


class TestFolderExport(ExportLaws):
    format = "folder"
    keys = tuple(key for key in ODD_KEYS if key != "a/b")  # its file would be that of "a/b.jpg"
    keeps_order = False
    refuses_rich = "folder cannot hold the column 'mask' of large_binary"
    refuses_tokens = "folder holds images"

    def read(self, folder, split):
        return read(folder, split.name)


def test_images_lie_in_class_folders_and_nothing_beside_them(repository, tmp_path):
    keys = ["cat/1.jpg", "dog/2.JPEG", "cat/deep/3.jpg"]
    write_version(repository, "pets", {"train": [photos(keys)]}, image_schema(labelled=True), CLASSES)
    dataset = open_dataset(repository, "pets")
    report = exported(dataset, tmp_path / "out", "folder")
    check(dataset, tmp_path / "out")
    assert sorted(files(tmp_path / "out")) == ["datasvc-export.json", *(f"train/{key}" for key in sorted(keys))]
    assert report.splits["train"].num_files == 3
    assert report.splits["train"].size_bytes == sum(len(sample["image"]) for sample in dataset["train"])


def test_names_that_are_no_keys_and_other_columns_are_in_the_metadata(repository, tmp_path):
    dataset = write_photos(repository, ["1", "2.jpg", "cat/3.jpg", "dog/4"])
    exported(dataset, tmp_path / "out", "folder")
    check(dataset, tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out/train/metadata.jsonl").read_text().splitlines()]
    assert lines[0] == {"file_name": "cat/1.jpg", "key": "1", "label": "cat"}
    assert [line["file_name"] for line in lines] == ["cat/1.jpg", "dog/2.jpg", "cat/3.jpg", "dog/4.jpg"]


def test_every_kind_of_column_comes_back_nulls_included(repository, tmp_path):
    schema = shard_schema(
        [
            KEY_FIELD,
            pa.field("image", pa.large_binary()),
            pa.field("n", pa.float32()),
            pa.field("x", pa.list_(pa.string())),
        ]
    )
    blob = photo("a")["image"]
    samples = [
        {"key": "a.jpg", "image": blob, "n": 0.5, "x": ["ß", None]},
        {"key": "b", "image": b"?", "n": None, "x": []},
    ]
    write_version(repository, "extra", {"train": [samples]}, schema)
    dataset = open_dataset(repository, "extra")
    exported(dataset, tmp_path / "out", "folder")
    check(dataset, tmp_path / "out", classes=())


def test_class_names_are_made_safe_too(repository, tmp_path):
    classes = ("..", "a/b", "ß")
    samples = [photo(f"{label}", label, label) for label in range(3)]
    write_version(repository, "odd", {"train": [samples]}, image_schema(labelled=True), classes)
    dataset = open_dataset(repository, "odd")
    exported(dataset, tmp_path / "out", "folder")
    check(dataset, tmp_path / "out", classes=classes)
    assert {path.name for path in (tmp_path / "out" / "train").iterdir() if path.is_dir()} == {"%2E%2E", "a%2Fb", "ß"}


@pytest.mark.parametrize("shards", [1, 2])
def test_two_samples_of_one_file_name_are_refused(repository, tmp_path, shards):
    dataset = write_photos(repository, ["cat/1", "x", "cat/1.jpg", "y"], shards=shards)
    with pytest.raises(ConfigError, match=r"1 sample would have the file name of another, such as 'cat/1.jpg'"):
        exported(dataset, tmp_path / "out", "folder")
    assert not (tmp_path / "out" / "datasvc-export.json").exists()


def test_no_sample_takes_the_name_of_the_metadata(repository, tmp_path):
    samples = [{**photo("metadata.jsonl"), "image": b"of no known kind"}]
    del samples[0]["label"]
    write_version(repository, "odd", {"train": [samples]}, image_schema(labelled=False))
    with pytest.raises(ConfigError, match=r"the file name of another, such as 'metadata.jsonl'"):
        exported(open_dataset(repository, "odd"), tmp_path / "out", "folder")


def test_labels_without_names_are_folders_of_numbers(repository, tmp_path):
    write_version(repository, "n", {"train": [photos(["a", "b"])]}, image_schema(labelled=True))
    exported(open_dataset(repository, "n"), tmp_path / "out", "folder")
    assert {"train/0/a.jpg", "train/1/b.jpg"} <= files(tmp_path / "out").keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": None}, "sample 'r/2' has no 'image'"),
        ({"label": None}, "sample 'r/2' has no 'label'"),
        ({"label": 2}, "label 2 of sample 'r/2'.* has 2 classes"),
    ],
)
def test_what_a_folder_cannot_hold_is_refused_by_name(repository, tmp_path, change, message):
    schema = shard_schema([KEY_FIELD, pa.field("image", pa.large_binary()), pa.field("label", pa.int32())])
    sample = {name: photo("r/2")[name] for name in schema.names}
    write_version(repository, "bad", {"train": [[{**sample, "key": "r/1"}, {**sample, **change}]]}, schema, CLASSES)
    with pytest.raises(ConfigError, match=message):
        exported(open_dataset(repository, "bad"), tmp_path / "out", "folder")


def test_columns_it_cannot_hold_are_named(repository, tmp_path):
    schema = shard_schema([KEY_FIELD, pa.field("image", pa.large_binary()), pa.field("file_name", pa.string())])
    write_version(repository, "named", {"train": [[{"key": "a", "image": b"", "file_name": "b"}]]}, schema)
    with pytest.raises(ConfigError, match="column 'file_name'"):
        exported(open_dataset(repository, "named"), tmp_path / "out", "folder")
