"""The sample index of a shard: the key and the digests of each sample, and the layout of the shard's record batches.

The sample index is a small object of its own. With it, an append, a diff and the search for duplicates read no
images, and a loader can verify single samples of a shard that is not fetched completely yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.errors import CorruptDataError
from datasvc.printable import count_text
from datasvc.shards.format.arrow_object import decode_metadata, decode_table, encode_table
from datasvc.shards.format.digests import DIGEST_BYTES, has_units
from datasvc.shards.format.layout import ShardLayout

INDEX_FORMAT = 3
_TEXT_FORMAT: Final = 2  # the last format in which dates, times, durations and decimals are hashed as text
_FORMAT_KEY: Final = b"datasvc.index.format"
_LAYOUT_KEY: Final = b"datasvc.index.batches"
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
        table: Arrow table with the columns `key`, `sample` and `payload`; for the two digests, see digests.py.
        layout: layout of the shard; None if the shard has no samples, or was written before layouts existed.
    """

    table: pa.Table
    layout: ShardLayout | None = None

    @classmethod
    def build(
        cls,
        keys: Sequence[str] | pa.Array,
        samples: Sequence[bytes] | pa.Array,
        payloads: Sequence[bytes] | pa.Array,
        layout: ShardLayout | None = None,
    ) -> SampleIndex:
        """Return the index of samples with these keys and digests, and with the layout of their shard.

        It has format 3 only if the shard has a column that this format hashes otherwise, so that earlier releases of
        datasvc read all other indexes.
        """
        has_format_3 = layout is not None and any(map(has_units, layout.schema.types))
        number = INDEX_FORMAT if has_format_3 else _TEXT_FORMAT
        schema = _SCHEMA.with_metadata({_FORMAT_KEY: str(number).encode()})
        return cls(pa.table([keys, samples, payloads], schema=schema), layout)

    def encode(self) -> bytes:
        """Return the index as an Arrow IPC file; equal indexes give equal bytes."""
        return encode_table(self.table, {_LAYOUT_KEY: self.layout.encode()} if self.layout is not None else None)

    @classmethod
    def decode(cls, content: bytes, name: str) -> SampleIndex:
        """Return the index that `encode` wrote. Raise CorruptDataError, or ConfigError for a newer format."""
        table = decode_table(
            content, name, what="sample index", format_key=_FORMAT_KEY, latest=INDEX_FORMAT, columns=_SCHEMA
        )
        encoded = decode_metadata(content).get(_LAYOUT_KEY)
        if encoded is None:
            return cls(table)
        layout = ShardLayout.decode(encoded, name)
        if layout.num_samples != table.num_rows:
            raise CorruptDataError(
                f"{name} lists {count_text(table.num_rows, 'sample')}, but its record batches have "
                f"{layout.num_samples}: "
                "restore it from another copy"
            )
        return cls(table, layout)

    @property
    def hashes_text(self) -> bool:
        """Whether dates, times, durations and decimals are hashed as text, as in the formats 1 and 2."""
        return int((self.table.schema.metadata or {})[_FORMAT_KEY]) <= _TEXT_FORMAT

    @property
    def num_samples(self) -> int:
        """Number of samples of the shard, deleted ones included."""
        return int(self.table.num_rows)

    @property
    def keys(self) -> list[str]:
        """Keys of the samples in the shard's order."""
        keys: list[str] = self.table.column("key").to_pylist()
        return keys

    def digests(self, column: str) -> Digests:
        """Return the digests of `column` ("sample" or "payload"): `V16[num_samples]`, 16 raw bytes per element."""
        values = self.table.column(column).combine_chunks()
        raw = np.frombuffer(values.buffers()[1] or b"", f"V{DIGEST_BYTES}")  # buffer 1 has the values
        return raw[values.offset : values.offset + len(values)]
