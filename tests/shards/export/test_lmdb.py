"""LMDB exports, read by lmdb and by Google's protobuf with Caffe's definition of Datum."""

import lmdb
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from datasvc.errors import ConfigError
from datasvc.shards import open_dataset
from datasvc.shards.format.schema import image_schema, shard_schema
from tests.shards.export.contents import CLASSES, KEY_FIELD, exported, files, photo, write_photos
from tests.shards.export.export_laws import ExportLaws
from tests.shards.written_versions import write_version

FIELDS = [("channels", 1, "INT32"), ("height", 2, "INT32"), ("width", 3, "INT32"), ("data", 4, "BYTES"),
          ("label", 5, "INT32"), ("encoded", 7, "BOOL")]  # fmt: skip


def datum_class():
    """Return the message class of caffe.proto's Datum, but for its floats."""
    file = descriptor_pb2.FileDescriptorProto(name="caffe_datum_test.proto", package="caffe", syntax="proto2")
    message = file.message_type.add(name="Datum")
    for name, number, kind in FIELDS:
        field = message.field.add(name=name, number=number)
        field.type = getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{kind}")
        field.label = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("caffe.Datum"))


def read(folder, split="train"):
    datum = datum_class()
    samples = []
    with lmdb.open(str(folder / split), readonly=True, lock=False) as database, database.begin() as transaction:
        for number, (name, value) in enumerate(transaction.cursor()):
            place, _, key = name.decode().partition("_")
            assert place == f"{number:08d}"
            message = datum.FromString(value)
            assert message.encoded
            size_bytes = message.ByteSize()
            message.DiscardUnknownFields()
            assert message.ByteSize() == size_bytes == len(value)
            label = message.label if message.HasField("label") else None
            samples.append({"key": key, "image": message.data, "label": label})
    return samples


class TestLmdbExport(ExportLaws):
    format = "lmdb"
    keys = ("a/1.jpg", "../x", "ключ", "a_b", "a\nb", "00000003_x", "9")
    is_local_only = True
    refuses_rich = "lmdb cannot hold the column 'caption' of string"
    refuses_tokens = "has no column 'image'"

    def read(self, folder, split):
        return read(folder, split.name)


def test_there_is_one_database_per_split(repository, tmp_path):
    exported(write_photos(repository, shards=3), tmp_path / "out", "lmdb")
    assert sorted(files(tmp_path / "out")) == ["datasvc-export.json", "train/data.mdb", "val/data.mdb"]


def test_labels_may_be_negative_or_not_there_at_all(repository, tmp_path):
    schema = shard_schema([KEY_FIELD, pa.field("image", pa.large_binary()), pa.field("label", pa.int32())])
    samples = [{**photo(f"{label}"), "label": label} for label in (0, -1, 2**31 - 1)]
    rows = [{name: sample[name] for name in schema.names} for sample in samples]
    write_version(repository, "labels", {"train": [rows]}, schema)
    plain = image_schema(labelled=False)
    rows = [{name: sample[name] for name in plain.names} for sample in samples]
    write_version(repository, "plain", {"train": [rows]}, plain)
    for name in ("labels", "plain"):
        dataset = open_dataset(repository, name)
        TestLmdbExport().check_round_trip(dataset, tmp_path / name)


def test_many_transactions_make_one_database(repository, tmp_path, monkeypatch):
    monkeypatch.setattr("datasvc.shards.export.lmdb_database._TRANSACTION_BYTES", 3000)
    dataset = write_photos(repository, [f"{number}" for number in range(40)])
    TestLmdbExport().check_round_trip(dataset, tmp_path / "out")


@pytest.mark.parametrize("size_bytes", [1, 2030, 4080, 4081, 5000])
def test_there_is_room_for_samples_of_any_size(repository, tmp_path, size_bytes):
    schema = shard_schema([KEY_FIELD, pa.field("image", pa.large_binary())])
    samples = [{"key": f"{number:0500d}", "image": bytes(size_bytes)} for number in range(2000)]
    write_version(repository, "many", {"train": [samples]}, schema)
    dataset = open_dataset(repository, "many")
    exported(dataset, tmp_path / "out", "lmdb")
    assert len(read(tmp_path / "out")) == 2000


def test_a_split_of_no_samples_is_an_empty_database(repository, tmp_path):
    write_version(repository, "none", {"train": []}, image_schema(labelled=True), CLASSES)
    exported(open_dataset(repository, "none"), tmp_path / "out", "lmdb")
    assert read(tmp_path / "out") == []


def test_a_missing_image_is_refused_by_name(repository, tmp_path):
    schema = shard_schema([KEY_FIELD, pa.field("image", pa.large_binary())])
    write_version(repository, "gaps", {"train": [[{"key": "a", "image": None}]]}, schema)
    with pytest.raises(ConfigError, match="sample 'a' has no 'image'"):
        exported(open_dataset(repository, "gaps"), tmp_path / "out", "lmdb")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".datasvc-export"]


def test_a_key_beyond_its_limit_is_refused(repository, tmp_path):
    with pytest.raises(ConfigError, match="at most 511 bytes"):
        exported(write_photos(repository, ["x" * 600]), tmp_path / "out", "lmdb")
