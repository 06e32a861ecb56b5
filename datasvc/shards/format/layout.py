"""Layout of a shard's file: the positions of its record batches, for reading samples before the shard is fetched.

`ipc_writer` records the layout, the sample index stores it, and `partial_reader` uses it. In the file, a record batch
is one IPC message of Arrow. For most record batches, the layout has the *frame*: the message without the bytes of its
blobs. With a frame, a reader fetches single blobs, and verifies them by the payload digests of the sample index. If
the frame is a large part of the message, as for text, the layout has a digest of the whole message instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

import pyarrow as pa

from datasvc.errors import CorruptDataError
from datasvc.shards.format.digests import DIGEST_BYTES
from datasvc.shards.format.ipc_reader import PARSE_ERRORS, check_schema, read_stream

_SCHEMA_KEY: Final = b"datasvc.sample_schema"
_SPAN = pa.struct([pa.field("offset", pa.int64(), nullable=False), pa.field("length", pa.int64(), nullable=False)])
_COLUMNS = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("samples", pa.int64(), nullable=False),
        pa.field("digest", pa.binary(DIGEST_BYTES)),
        pa.field("frame", pa.large_binary()),
        pa.field("blobs", pa.list_(pa.field("item", _SPAN, nullable=False)), nullable=False),
    ]
)


@dataclass(frozen=True)
class ByteRange:
    """A range of bytes of a file or of a message."""

    offset: int
    length: int


@dataclass(frozen=True)
class BatchLayout:
    """Position and contents of one record batch in a shard's file.

    Attributes:
        message: range of its encapsulated IPC message (metadata and body) in the file.
        num_samples: number of samples.
        digest: 128-bit xxHash3 of the message; None if there is a frame.
        frame: the message without the bytes of `blobs`; None if there is a digest.
        blobs: with a frame, the range of each blob column's bytes within the message, in the schema's order.
    """

    message: ByteRange
    num_samples: int
    digest: bytes | None = None
    frame: bytes | None = None
    blobs: tuple[ByteRange, ...] = ()


@dataclass(frozen=True)
class ShardLayout:
    """A shard's schema and the layout of its record batches.

    Attributes:
        schema: schema of the shard's file, which may lack columns of its split.
        batches: all record batches in order.
    """

    schema: pa.Schema
    batches: tuple[BatchLayout, ...]

    def encode(self) -> bytes:
        """Return the layout as an Arrow IPC stream; equal layouts give equal bytes."""
        rows = [
            {
                "offset": batch.message.offset,
                "length": batch.message.length,
                "samples": batch.num_samples,
                "digest": batch.digest,
                "frame": batch.frame,
                "blobs": [asdict(span) for span in batch.blobs],
            }
            for batch in self.batches
        ]
        schema = _COLUMNS.with_metadata({_SCHEMA_KEY: self.schema.serialize().to_pybytes()})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as stream:
            stream.write_batch(pa.RecordBatch.from_pylist(rows, schema))
        return bytes(sink.getvalue().to_pybytes())

    @classmethod
    def decode(cls, content: bytes, name: str) -> ShardLayout:
        """Return the layout that `encode` wrote. Raise CorruptDataError."""
        try:
            table = read_stream(content)
            if not table.schema.equals(_COLUMNS):
                raise ValueError(f"it has the columns {table.schema.names}; expected {_COLUMNS.names}")
            schema = pa.ipc.read_schema(pa.py_buffer((table.schema.metadata or {})[_SCHEMA_KEY]))
            check_schema(schema)
            batches = tuple(_decode_batch(row) for row in table.to_pylist())
        except PARSE_ERRORS as error:
            raise CorruptDataError(
                f"{name} has an invalid layout of the shard's record batches: {error!r}"
            ) from error
        return cls(schema, batches)

    @property
    def num_samples(self) -> int:
        """Number of samples of all record batches."""
        return sum(batch.num_samples for batch in self.batches)


def check_ranges(ranges: Iterable[ByteRange], size_bytes: int) -> None:
    """Raise ValueError if ranges overlap, have a negative length, or end after `size_bytes`."""
    position = 0
    for span in sorted(ranges, key=lambda span: span.offset):
        if span.length < 0 or span.offset < position or span.offset + span.length > size_bytes:
            raise ValueError(f"bytes {span.offset} to {span.offset + span.length} are not a valid range")
        position = span.offset + span.length


def _decode_batch(row: dict[str, Any]) -> BatchLayout:
    # Without a frame or a digest, the bytes of the batch could not be verified. A writer never stores both.
    if (row["frame"] is None) == (row["digest"] is None):
        raise ValueError("a record batch needs either a digest or a frame")
    message = ByteRange(row["offset"], row["length"])
    blobs = tuple(ByteRange(**span) for span in row["blobs"])
    if row["samples"] < 0:
        raise ValueError("a record batch has a negative number of samples")
    return BatchLayout(message, row["samples"], digest=row["digest"], frame=row["frame"], blobs=blobs)
