"""MDS exports, read by MosaicML's own reader.

The package `streaming` wants a dozen others when it is imported as a whole; its local reader wants none of them, so
its parent packages are stood in for, and so are the compressions, which nothing here uses.
"""

import dataclasses
import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from datasvc.errors import ConfigError
from datasvc.shards import open_dataset
from datasvc.shards.export import mds
from datasvc.shards.format.schema import shard_schema
from tests.shards.export.contents import (
    KEY_FIELD,
    digests,
    exported,
    version_digests,
    write_photos,
    write_rich,
    write_tokens,
)
from tests.shards.export.export_laws import ExportLaws
from tests.shards.written_versions import describe_table, write_version


@pytest.fixture
def local_dataset(monkeypatch):
    """MosaicML's reader of local MDS folders."""
    found = importlib.util.find_spec("streaming")
    if found is None:
        pytest.skip("mosaicml-streaming is not installed")
    for name in [name for name in sys.modules if name.partition(".")[0] == "streaming"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("streaming", "streaming.base"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(found.origin).parent.joinpath(*name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, name, package)
    for name in ("brotli", "snappy", "zstd"):
        if importlib.util.find_spec(name) is None:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    from streaming.base.local import LocalDataset

    yield LocalDataset
    for name in [name for name in sys.modules if name.startswith("streaming.")]:
        monkeypatch.delitem(sys.modules, name)


def value_of(found):
    """Return what the reader gave as Python values; an image as the bytes that it was opened from."""
    if hasattr(found, "fp"):
        return found.fp.getvalue()
    return found.tolist() if isinstance(found, (np.ndarray, np.generic)) else found


def read(local_dataset, folder, split="train"):
    opened = local_dataset(str(folder), split)
    for shard in opened.shards:
        shard.validate(allow_unsafe_types=False)
    samples = [opened[number] for number in range(len(opened))]
    return [{name: value_of(found) for name, found in sample.items()} for sample in samples]


def check(local_dataset, dataset, folder, split="train"):
    found = read(local_dataset, folder, split)
    assert [sample["key"] for sample in found] == [sample["key"] for sample in dataset[split]]
    assert digests(found, dataset[split].table.sample_schema) == version_digests(dataset[split])


def encodings(folder, split="train"):
    """Return the encoding of each column, for each shard."""
    shards = json.loads((folder / split / "index.json").read_text())["shards"]
    return [dict(zip(shard["column_names"], shard["column_encodings"], strict=True)) for shard in shards]


class TestMdsExport(ExportLaws):
    format = "mds"
    rich_values = {"image": b"no image", "mask": b""}  # noqa: RUF012 - never changed

    @pytest.fixture(autouse=True)
    def with_reader(self, local_dataset):
        self.local_dataset = local_dataset

    def read(self, folder, split):
        return read(self.local_dataset, folder, split.name) if len(split) else []


@pytest.mark.parametrize(
    ("kinds", "encoding"), [({"JPEG": 7}, "jpeg"), ({"PNG": 7}, "png"), ({"JPEG": 6, "PNG": 1}, "bytes")]
)
def test_images_of_one_kind_are_decoded_by_the_reader(local_dataset, repository, tmp_path, kinds, encoding):
    counted = dataclasses.replace(write_photos(repository)["train"].table, image_kinds=kinds)
    splits = {"train": describe_table(repository.objects, counted)}
    repository.versions("datasets", "photos").append(lambda _head: {"splits": splits})
    dataset = open_dataset(repository, "photos")
    exported(dataset, tmp_path / "out", "mds")
    assert encodings(tmp_path / "out")[0]["image"] == encoding
    check(local_dataset, dataset, tmp_path / "out")


def test_each_kind_of_column_has_its_encoding(repository, tmp_path):
    exported(write_rich(repository, image=b"no image", mask=b""), tmp_path / "out", "mds")
    assert encodings(tmp_path / "out")[0] == {
        "Source": "json", "boxes": "json", "caption": "json", "counts": "json", "image": "bytes", "is_good": "json",
        "key": "str", "label": "json", "mask": "bytes", "score": "json", "small": "uint8", "tags": "json",
        "views": "json", "weight": "float64",
    }  # fmt: skip


def test_the_encoding_follows_what_a_shard_holds(local_dataset, repository, tmp_path):
    schema = shard_schema([KEY_FIELD, pa.field("n", pa.int16()), pa.field("text", pa.string())])
    shards = [[{"key": "a", "n": 1, "text": ""}], [{"key": "b", "n": None, "text": None}]]
    write_version(repository, "mixed", {"train": shards}, schema)
    dataset = open_dataset(repository, "mixed")
    exported(dataset, tmp_path / "out", "mds")
    check(local_dataset, dataset, tmp_path / "out")
    assert encodings(tmp_path / "out") == [
        {"key": "str", "n": "int16", "text": "str"},
        {"key": "str", "n": "json", "text": "json"},
    ]


def test_token_blocks_are_arrays(repository, tmp_path):
    exported(write_tokens(repository), tmp_path / "out", "mds")
    expected = {"key": "str", "tokens": "ndarray:int32:8", "ids": "ndarray:uint16", "embedding": "ndarray:float32"}
    assert encodings(tmp_path / "out") == [expected, expected]


@pytest.mark.parametrize("length", [1, 255, 256, 65535, 65536])
def test_arrays_of_any_length_come_back(local_dataset, repository, tmp_path, length):
    schema = shard_schema([KEY_FIELD, pa.field("za", pa.list_(pa.int8())), pa.field("ab", pa.bool_())])
    samples = [{"key": "a", "za": [1] * length, "ab": True}]
    write_version(repository, "long", {"train": [samples]}, schema)
    dataset = open_dataset(repository, "long")
    exported(dataset, tmp_path / "out", "mds")
    check(local_dataset, dataset, tmp_path / "out")
    # The writer of the package sorts its columns, so that an index is the same whatever their order.
    assert list(encodings(tmp_path / "out")[0].items()) == [("ab", "json"), ("key", "str"), ("za", "ndarray:int8")]


def test_lists_that_are_no_arrays_for_it_come_back_as_json(local_dataset, repository, tmp_path):
    schema = shard_schema(
        [KEY_FIELD, pa.field("ids", pa.list_(pa.int64())), pa.field("pair", pa.list_(pa.int8(), 2))]
    )
    samples = [{"key": "a", "ids": [], "pair": [1, None]}, {"key": "b", "ids": [2**60], "pair": [0, -128]}]
    write_version(repository, "lists", {"train": [samples]}, schema)
    dataset = open_dataset(repository, "lists")
    exported(dataset, tmp_path / "out", "mds")
    check(local_dataset, dataset, tmp_path / "out")
    assert encodings(tmp_path / "out")[0] == {"ids": "json", "key": "str", "pair": "json"}


def test_a_missing_image_is_refused_by_name(repository, tmp_path):
    dataset = write_rich(repository)
    with pytest.raises(ConfigError, match=r"mds cannot hold a null: sample 'r/2' has no 'image'.*webdataset"):
        exported(dataset, tmp_path / "out", "mds")
    assert not (tmp_path / "out" / "train" / "index.json").exists()


def test_a_column_it_cannot_hold_is_named(repository, tmp_path):
    schema = shard_schema([KEY_FIELD, pa.field("day", pa.date32())])
    write_version(repository, "days", {"train": [[{"key": "a", "day": None}]]}, schema)
    with pytest.raises(ConfigError, match=r"mds cannot hold the column 'day' of date32.*parquet"):
        exported(open_dataset(repository, "days"), tmp_path / "out", "mds")


def test_a_file_beyond_its_offsets_is_refused(repository, tmp_path, monkeypatch):
    monkeypatch.setattr(mds, "_MAX_FILE_BYTES", 1000)  # 4 GiB would take a while
    with pytest.raises(ConfigError, match=r"less than 4 GiB.*smaller --shard-size"):
        exported(write_photos(repository), tmp_path / "out", "mds")
