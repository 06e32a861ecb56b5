"""The sample index of a shard: the key and the digests of each of its samples, without the samples.

A small object beside each shard, so that appending, comparing and looking for duplicates never read an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.shards.arrow_object import decode_table, encode_table
from datasvc.shards.digests import DIGEST_BYTES

INDEX_FORMAT = 1
_FORMAT_KEY: Final = b"datasvc.index.format"
_SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("sample", pa.binary(DIGEST_BYTES), nullable=False),
        pa.field("payload", pa.binary(DIGEST_BYTES), nullable=False),
    ],
    metadata={_FORMAT_KEY: str(INDEX_FORMAT).encode()},
)

Digests = npt.NDArray[np.void]


@dataclass(frozen=True)
class SampleIndex:
    """Keys and digests of a shard's samples, in the shard's order.

    Attributes:
        table: Arrow table with the columns `key`, `sample` and `payload`, see `digests`.
    """

    table: pa.Table

    @classmethod
    def build(cls, keys: Sequence[str], samples: Sequence[bytes], payloads: Sequence[bytes]) -> SampleIndex:
        """Return the index of samples given by their keys and digests."""
        columns = [
            pa.array(values, field.type) for values, field in zip((keys, samples, payloads), _SCHEMA, strict=True)
        ]
        return cls(pa.Table.from_arrays(columns, schema=_SCHEMA))

    def encode(self) -> bytes:
        """Return the index as an Arrow IPC file; equal indexes give equal bytes."""
        return encode_table(self.table)

    @classmethod
    def decode(cls, content: bytes, name: str) -> SampleIndex:
        """Return the index that `encode` gave. Raises CorruptDataError, ConfigError for a later format."""
        return cls(decode_table(content, name, what="sample index", format_key=_FORMAT_KEY, latest=INDEX_FORMAT))

    @property
    def num_samples(self) -> int:
        """Samples of the shard, deleted ones included."""
        return int(self.table.num_rows)

    @property
    def keys(self) -> list[str]:
        """Return the keys in the shard's order."""
        keys: list[str] = self.table.column("key").to_pylist()
        return keys

    def digests(self, column: str) -> Digests:
        """Return the digests of `column` ("sample" or "payload"): `void16[num_samples]`, comparable and sortable."""
        joined = self.table.column(column).combine_chunks()
        chunk = joined.chunk(0) if isinstance(joined, pa.ChunkedArray) else joined
        raw = np.frombuffer(chunk.buffers()[1] or b"", f"V{DIGEST_BYTES}")
        return raw[chunk.offset : chunk.offset + len(chunk)]
