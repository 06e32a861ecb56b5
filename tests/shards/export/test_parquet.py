"""Parquet exports, read by pyarrow."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datasvc.errors import ConfigError
from datasvc.shards import open_dataset
from datasvc.shards.format.schema import shard_schema
from tests.shards.export.contents import CLASSES, KEY_FIELD, exported, files, write_photos, write_tokens
from tests.shards.export.export_laws import ExportLaws
from tests.shards.written_versions import write_version


class TestParquetExport(ExportLaws):
    format = "parquet"

    def read(self, folder, split):
        schema = split.table.sample_schema
        tables = [pq.read_table(path) for path in sorted(folder.glob(f"{split.name}-*.parquet"))]
        as_they_are = [field for field in schema if field.name != "label" or not split.classes]
        for table in tables:
            assert table.schema.names == schema.names
            assert [table.schema.field(field.name) for field in as_they_are] == as_they_are
        return [sample for table in tables for sample in table.to_pylist()]


def test_there_is_one_file_per_shard_named_as_the_hub_does(repository, tmp_path):
    exported(write_photos(repository), tmp_path / "out", "parquet")
    names = ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "val-00000-of-00001.parquet"]
    assert sorted(files(tmp_path / "out")) == ["datasvc-export.json", *names]


def test_what_no_other_format_holds_comes_back(repository, tmp_path):
    schema = shard_schema(
        [
            KEY_FIELD,
            pa.field("taken", pa.timestamp("us", "UTC")),
            pa.field("parts", pa.list_(pa.binary())),
            pa.field("price", pa.decimal128(9, 2)),
            pa.field("scores", pa.map_(pa.string(), pa.float64())),
        ]
    )
    sample = {"key": "a", "taken": 1, "parts": [b"\0", None], "price": None, "scores": {"x": float("nan")}}
    write_version(repository, "wide", {"train": [[sample]]}, schema)
    dataset = open_dataset(repository, "wide")
    TestParquetExport().check_round_trip(dataset, tmp_path / "out")


def test_hugging_face_gets_the_names_of_the_classes(repository, tmp_path):
    exported(write_photos(repository), tmp_path / "out", "parquet")
    schema = pq.read_schema(tmp_path / "out" / "val-00000-of-00001.parquet")
    features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert features == {"label": {"names": list(CLASSES), "_type": "ClassLabel"}}
    # It compares with the Arrow type of its own feature, and forgets the names where they differ.
    assert schema.field("label") == pa.field("label", pa.int64())


def test_a_split_without_classes_has_no_metadata_for_hugging_face(repository, tmp_path):
    exported(write_tokens(repository), tmp_path / "out", "parquet")
    assert b"huggingface" not in pq.read_schema(tmp_path / "out" / "train-00000-of-00002.parquet").metadata


def test_a_struct_without_fields_is_refused(repository, tmp_path):
    write_version(
        repository,
        "made",
        {"train": [[{"key": "a", "meta": {}}]]},
        shard_schema([KEY_FIELD, pa.field("meta", pa.struct([]))]),
    )
    with pytest.raises(ConfigError, match="'meta'"):
        exported(open_dataset(repository, "made"), tmp_path / "out", "parquet")


def test_row_groups_are_bounded_by_the_batches_of_the_shard(repository, tmp_path):
    schema = shard_schema([KEY_FIELD, pa.field("blob", pa.large_binary())])
    samples = [{"key": f"{number}", "blob": bytes(1 << 20)} for number in range(10)]
    write_version(repository, "big", {"train": [samples]}, schema)
    exported(open_dataset(repository, "big"), tmp_path / "out", "parquet")
    with pq.ParquetFile(tmp_path / "out" / "train-00000-of-00001.parquet") as file:
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    assert sum(sizes) == 10
    assert max(sizes) <= 5
