"""Export format of Parquet: one file per shard with all columns, named and described as Hugging Face does it."""

from __future__ import annotations

import json
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from datasvc.shards.export.destination import Destination, safe_part
from datasvc.shards.export.export_format import (
    ExportFormat,
    ExportUnit,
    WrittenFiles,
    given_columns,
    has_label,
    refused_column,
)
from datasvc.shards.format.schema import LABEL, is_blob
from datasvc.shards.versions.dataset import Split


class ParquetExport(ExportFormat):
    """Writes each unit as one file, `SPLIT-00000-of-00010.parquet`, with row groups of a few megabytes."""

    name: ClassVar[str] = "parquet"

    def check(self, split: Split) -> None:
        """Raise ConfigError for structs without fields, the only values of Arrow that Parquet cannot hold."""
        for column in given_columns(split.table.sample_schema):
            if _has_empty_struct(column.type):
                raise refused_column("parquet", column, "none; export a version without this column")

    def write(self, unit: ExportUnit, destination: Destination) -> WrittenFiles:
        """Write one file. For errors, see `ExportFormat.write`."""
        schema = described_schema(unit.split)
        # Dictionary encoding of blobs costs time and saves nothing, because the blobs differ.
        dictionary_columns = [field.name for field in schema if not is_blob(field.type)]
        name = f"{safe_part(unit.split.name)}-{unit.number:05d}-of-{unit.num_units:05d}.parquet"
        with destination.writing(name) as file:
            with pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=dictionary_columns) as writer:
                for batch in unit.batches():
                    writer.write_batch(batch.cast(schema))  # each batch becomes a row group
            size_bytes = file.tell()
        return WrittenFiles(unit.num_samples, 1, size_bytes)


def described_schema(split: Split) -> pa.Schema:
    """Return the schema of a split's files; Hugging Face `datasets` reads the class names in its metadata."""
    schema = split.table.sample_schema
    if not split.classes or not has_label(schema):
        return schema
    features = {LABEL: {"names": list(split.classes), "_type": "ClassLabel"}}
    described = json.dumps({"info": {"features": features}}, ensure_ascii=False).encode()
    # `datasets` applies class names only to a column of its own type: int64, nullable.
    labelled = schema.set(schema.get_field_index(LABEL), pa.field(LABEL, pa.int64()))
    return labelled.with_metadata({**(schema.metadata or {}), b"huggingface": described})


def _has_empty_struct(data_type: pa.DataType) -> bool:
    """Return whether a type is a struct without fields, or has one at any depth."""
    inner = [data_type.field(number).type for number in range(data_type.num_fields)]
    return (pa.types.is_struct(data_type) and not inner) or any(map(_has_empty_struct, inner))
