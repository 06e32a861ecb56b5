"""TFRecord exports, read by the tfrecord package; its own checksums are compared too."""

import struct

import numpy as np
import pyarrow as pa
import pytest
import tfrecord
from hypothesis import given
from hypothesis import strategies as st
from tfrecord.writer import TFRecordWriter

from datasvc.errors import ConfigError
from datasvc.shards import open_dataset
from datasvc.shards.format.schema import shard_schema
from datasvc.shards.sources.common.protobuf import packed_varints, read_packed_varints, varint
from tests.shards.export.contents import KEY_FIELD, exported, files, write_photos
from tests.shards.export.export_laws import ExportLaws
from tests.shards.written_versions import write_version

FLAT = shard_schema(
    [
        KEY_FIELD,
        pa.field("text", pa.string()),
        pa.field("blob", pa.large_binary()),
        pa.field("small", pa.int8()),
        pa.field("large", pa.uint64()),
        pa.field("truth", pa.bool_()),
        pa.field("half", pa.float16()),
        pa.field("single", pa.float32()),
        pa.field("numbers", pa.list_(pa.int64())),
        pa.field("floats", pa.list_(pa.float32())),
        pa.field("words", pa.list_(pa.string())),
        pa.field("pair", pa.list_(pa.bool_(), 2)),
    ]
)


def value_of(found, data_type):
    """Return what the reader gave as a value of a column's type: a tf.Example knows three types only."""
    if pa.types.is_list(data_type) or pa.types.is_fixed_size_list(data_type):
        inner = data_type.value_type
        values = [found] if isinstance(found, bytes) else list(found)
        return [value_of(value, inner) for value in values]
    if isinstance(found, np.ndarray):
        (found,) = found.tolist()
    if pa.types.is_string(data_type):
        return found.decode()
    if pa.types.is_boolean(data_type):
        return bool(found)
    return found.item() if isinstance(found, np.generic) else found


def read(folder, schema, split="train"):
    samples = []
    for path in sorted(folder.glob(f"{split}-*.tfrecord")):
        for example in tfrecord.tfrecord_loader(str(path), None):
            samples.append({name: value_of(found, schema.field(name).type) for name, found in example.items()})
    return samples


class TestTfRecordExport(ExportLaws):
    format = "tfrecord"
    refuses_rich = "'weight' of double"

    def read(self, folder, split):
        return read(folder, split.table.sample_schema, split.name)


def test_there_is_one_file_per_shard_named_as_tensorflow_does(repository, tmp_path):
    exported(write_photos(repository), tmp_path / "out", "tfrecord")
    names = ["train-00000-of-00002.tfrecord", "train-00001-of-00002.tfrecord", "val-00000-of-00001.tfrecord"]
    assert sorted(files(tmp_path / "out")) == ["datasvc-export.json", *names]


def test_every_kind_of_column_comes_back_nulls_included(repository, tmp_path):
    full = {
        "key": "full", "text": "ключ", "blob": b"\0\xff", "small": -128, "large": 2**63 - 1, "truth": True,
        "half": 0.5, "single": float(np.float32(0.1)), "numbers": [0, -1, 2**63 - 1, -(2**63), 127, 128],
        "floats": [0.5, -0.0],
        "words": ["a", "", "ß"], "pair": [True, False],
    }  # fmt: skip
    empty = {**full, "key": "empty", "text": "", "blob": b"", "numbers": [], "floats": [], "words": [], "large": 0}
    null = {**dict.fromkeys(FLAT.names), "key": "null"}
    write_version(repository, "flat", {"train": [[full, null], [empty]]}, FLAT)
    dataset = open_dataset(repository, "flat")
    TestTfRecordExport().check_round_trip(dataset, tmp_path / "out")


def test_checksums_are_those_of_the_tfrecord_package(repository, tmp_path):
    exported(write_photos(repository), tmp_path / "out", "tfrecord")
    raw = (tmp_path / "out" / "val-00000-of-00001.tfrecord").read_bytes()
    offset = num_records = 0
    while offset < len(raw):
        head = raw[offset : offset + 8]
        (length,) = struct.unpack("<Q", head)
        message = raw[offset + 12 : offset + 12 + length]
        assert raw[offset + 8 : offset + 12] == TFRecordWriter.masked_crc(head)
        assert raw[offset + 12 + length : offset + 16 + length] == TFRecordWriter.masked_crc(message)
        offset += 16 + length
        num_records += 1
    assert num_records == 2


@pytest.mark.parametrize(
    ("column", "formats"),
    [
        (pa.field("exact", pa.float64()), "parquet, webdataset, mds"),
        (pa.field("boxes", pa.list_(pa.list_(pa.int32()))), "parquet, webdataset, mds"),
        (pa.field("taken", pa.timestamp("us")), "parquet$"),
    ],
)
def test_a_column_it_cannot_hold_is_named(repository, tmp_path, column, formats):
    write_version(
        repository, "bad", {"train": [[{"key": "a", column.name: None}]]}, shard_schema([KEY_FIELD, column])
    )
    with pytest.raises(
        ConfigError, match=f"tfrecord cannot hold the column '{column.name}'.*formats that can: {formats}"
    ):
        exported(open_dataset(repository, "bad"), tmp_path / "out", "tfrecord")


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (pa.field("big", pa.uint64()), 2**63, "cannot hold 'big' of sample 'a'"),
        (pa.field("ids", pa.list_(pa.int32())), [1, None], r"sample 'a' has no 'ids\[\]'"),
    ],
)
def test_a_value_it_cannot_hold_is_named(repository, tmp_path, column, value, message):
    write_version(
        repository, "bad", {"train": [[{"key": "a", column.name: value}]]}, shard_schema([KEY_FIELD, column])
    )
    with pytest.raises(ConfigError, match=message):
        exported(open_dataset(repository, "bad"), tmp_path / "out", "tfrecord")
    assert not list((tmp_path / "out").glob("*"))[1:]


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_packed_numbers_are_those_written_one_by_one(numbers):
    packed = packed_varints(np.array(numbers, np.int64))
    assert packed == b"".join(map(varint, numbers))
    assert read_packed_varints(memoryview(packed)).tolist() == numbers
