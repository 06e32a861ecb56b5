"""The shard table of a split: one row per shard. It is an object, so its digest identifies the split's samples.

Some hundred bytes a shard, whatever the samples: a billion of them open in seconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.keyed import Integers
from datasvc.repository import Digest, ObjectInfo
from datasvc.shards.writer import ShardStatistics

TABLE_FORMAT = 1
_COLUMNS = pa.schema(
    [
        pa.field("digest", pa.binary(32), nullable=False),
        pa.field("samples", pa.int64(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("max_width", pa.int32(), nullable=False),
        pa.field("max_height", pa.int32(), nullable=False),
        pa.field("max_sample_bytes", pa.int64(), nullable=False),
    ]
)
_METADATA_KEY = b"datasvc.table"


@dataclass(frozen=True)
class ShardTable:
    """The shards of one split, in table order.

    Attributes:
        rows: Arrow table with the columns of docs/formats.md.
        sample_schema: the columns of the samples.
        classes: names of the labels, index by index; empty without labels.
    """

    rows: pa.Table
    sample_schema: pa.Schema
    classes: tuple[str, ...] = ()

    @classmethod
    def build(
        cls,
        shards: Sequence[tuple[ObjectInfo, ShardStatistics]],
        sample_schema: pa.Schema,
        classes: Sequence[str] = (),
    ) -> ShardTable:
        """Return the table of `shards`, in that order."""
        rows = [
            {
                "digest": bytes.fromhex(info.digest),
                "samples": statistics.num_samples,
                "bytes": info.size_bytes,
                "max_width": statistics.max_width,
                "max_height": statistics.max_height,
                "max_sample_bytes": statistics.max_sample_bytes,
            }
            for info, statistics in shards
        ]
        return cls(pa.Table.from_pylist(rows, schema=_COLUMNS), sample_schema, tuple(classes))

    def encode(self) -> bytes:
        """Return the table as an Arrow IPC file; equal tables give equal bytes."""
        described: dict[str, Any] = {
            "format": TABLE_FORMAT,
            "classes": list(self.classes),
            "columns": {field.name: str(field.type) for field in self.sample_schema},
        }
        metadata = {
            _METADATA_KEY: json.dumps(described, sort_keys=True, ensure_ascii=False).encode(),
            b"datasvc.sample_schema": self.sample_schema.serialize().to_pybytes(),
        }
        sink = pa.BufferOutputStream()
        table = self.rows.combine_chunks().replace_schema_metadata(metadata)
        with pa.ipc.new_file(sink, table.schema) as file:
            file.write_table(table)
        return bytes(sink.getvalue().to_pybytes())

    @classmethod
    def decode(cls, content: bytes, name: str) -> ShardTable:
        """Return the table that `encode` gave.

        Raises:
            CorruptDataError: not a shard table.
            ConfigError: a later format.
        """
        try:
            rows = pa.ipc.open_file(pa.py_buffer(content)).read_all()
            described = json.loads(rows.schema.metadata[_METADATA_KEY])
            schema = pa.ipc.read_schema(pa.py_buffer(rows.schema.metadata[b"datasvc.sample_schema"]))
            later = int(described["format"]) > TABLE_FORMAT
        except (pa.ArrowInvalid, KeyError, ValueError, TypeError) as error:
            raise CorruptDataError(f"{name} is no shard table: {error!r}") from error
        if later:
            raise ConfigError(
                f"{name} has shard table format {described['format']}; this datasvc reads up to {TABLE_FORMAT}"
            )
        return cls(rows, schema, tuple(described["classes"]))

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return int(self.rows.num_rows)

    @property
    def samples_per_shard(self) -> Integers:
        """Samples of each shard: `int64[num_shards]`."""
        return np.asarray(self.rows.column("samples").to_numpy(), np.int64)

    @property
    def bytes_per_shard(self) -> Integers:
        """Size of each shard's file: `int64[num_shards]`."""
        return np.asarray(self.rows.column("bytes").to_numpy(), np.int64)

    @property
    def num_samples(self) -> int:
        """Samples of the split."""
        return int(self.samples_per_shard.sum())

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards."""
        return int(self.bytes_per_shard.sum())

    def largest(self, statistic: str) -> int:
        """Return the largest value of a statistics column, 0 without shards: for `preallocate` hints."""
        return int(self.rows.column(statistic).to_numpy().max(initial=0))

    def shard(self, number: int) -> ObjectInfo:
        """Return name and size of one shard."""
        digest = Digest(self.rows.column("digest")[number].as_py().hex())
        return ObjectInfo(digest, int(self.rows.column("bytes")[number].as_py()))

    def shards(self) -> list[ObjectInfo]:
        """Return all shards in table order."""
        digests, sizes = self.rows.column("digest").to_pylist(), self.rows.column("bytes").to_pylist()
        return [ObjectInfo(Digest(digest.hex()), size) for digest, size in zip(digests, sizes, strict=True)]
