"""The sample index of a shard: the key and the digests of each sample, and the layout of the shard's record batches.

The sample index is a small object of its own. With it, an append, a diff and the search for duplicates read no
images, and a loader can verify single samples of a shard that is not fetched completely yet. In the file, a record
batch is one IPC message of Arrow. For most record batches, the layout has the *frame*: the message without the bytes
of its blobs. With a frame, a reader fetches single blobs, and verifies them by the payload digests. If the frame is a
large part of the message, as for text, the layout has a digest of the whole message instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.errors import CorruptDataError
from datasvc.printable import count_text
from datasvc.shards.format.digests import DIGEST_BYTES, has_units
from datasvc.shards.format.ipc_reader import (
    PARSE_ERRORS,
    check_schema,
    decode_metadata,
    decode_table,
    encode_table,
    read_stream,
)

INDEX_FORMAT = 3
_TEXT_FORMAT: Final = 2  # the last format in which dates, times, durations and decimals are hashed as text
_FORMAT_KEY: Final = b"datasvc.index.format"
_LAYOUT_KEY: Final = b"datasvc.index.batches"
_PARTS_KEY: Final = b"datasvc.index.parts"  # releases without it ignore it, and read whole blobs
_SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("sample", pa.binary(DIGEST_BYTES), nullable=False),
        pa.field("payload", pa.binary(DIGEST_BYTES), nullable=False),
    ],
    metadata={_FORMAT_KEY: str(INDEX_FORMAT).encode()},
)

Digests = npt.NDArray[np.void]


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

_PARTS = pa.schema(
    [
        pa.field("sample", pa.int64(), nullable=False),
        pa.field("part_bytes", pa.int64(), nullable=False),
        pa.field("digests", pa.large_binary(), nullable=False),
    ]
)


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

        It has format 3 only if this format hashes a column otherwise: earlier releases read all other indexes.
        """
        has_format_3 = layout is not None and any(map(has_units, layout.schema.types))
        number = INDEX_FORMAT if has_format_3 else _TEXT_FORMAT
        schema = _SCHEMA.with_metadata({_FORMAT_KEY: str(number).encode()})
        return cls(pa.table([keys, samples, payloads], schema=schema), layout)

    def encode(self) -> bytes:
        """Return the index as an Arrow IPC file; equal indexes give equal bytes."""
        if self.layout is None:
            return encode_table(self.table, None)
        parts = {_PARTS_KEY: _encode_parts(self.layout.parts)} if self.layout.parts else {}
        return encode_table(self.table, {_LAYOUT_KEY: self.layout.encode(), **parts})

    @classmethod
    def decode(cls, content: bytes, name: str) -> SampleIndex:
        """Return the index that `encode` wrote. Raise CorruptDataError, or ConfigError for a newer format."""
        table = decode_table(
            content, name, what="sample index", format_key=_FORMAT_KEY, latest=INDEX_FORMAT, columns=_SCHEMA
        )
        metadata = decode_metadata(content)
        if _LAYOUT_KEY not in metadata:
            return cls(table)
        layout = ShardLayout.decode(metadata[_LAYOUT_KEY], name)
        if _PARTS_KEY in metadata:
            layout = replace(layout, parts=_decode_parts(metadata[_PARTS_KEY], name))
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
class SampleParts:
    """Digests of the parts of the only blob of a sample that has bytes.

    Attributes:
        sample: number of the sample in the shard.
        part_bytes: size of each part; the last one may be smaller.
        digests: 128-bit xxHash3 of each part, joined.
    """

    sample: int
    part_bytes: int
    digests: bytes

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return len(self.digests) // DIGEST_BYTES

    def count(self, size_bytes: int) -> int:
        """Return the number of parts that a blob of a size has."""
        return -(-size_bytes // self.part_bytes)

    def digest(self, number: int) -> bytes:
        """Return the digest of a part."""
        return self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]


@dataclass(frozen=True)
class ShardLayout:
    """A shard's schema and the layout of its record batches.

    Attributes:
        schema: schema of the shard's file, which may lack columns of its split.
        batches: all record batches in order.
        parts: digests of the parts of large blobs, see `parts.digest_parts`.
    """

    schema: pa.Schema
    batches: tuple[BatchLayout, ...]
    parts: tuple[SampleParts, ...] = ()

    def encode(self) -> bytes:
        """Return the layout without `parts` as an Arrow IPC stream; equal layouts give equal bytes."""
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
        return _encode_stream(rows, schema)

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


def _encode_stream(rows: list[dict[str, Any]], schema: pa.Schema) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.RecordBatch.from_pylist(rows, schema))
    return bytes(sink.getvalue().to_pybytes())


def _encode_parts(parts: Sequence[SampleParts]) -> bytes:
    return _encode_stream([asdict(each) for each in parts], _PARTS)


def _decode_parts(content: bytes, name: str) -> tuple[SampleParts, ...]:
    try:
        table = read_stream(content)
        if not table.schema.equals(_PARTS):
            raise ValueError(f"they have the columns {table.schema.names}; expected {_PARTS.names}")
        parts = tuple(SampleParts(**row) for row in table.to_pylist())
        if any(each.part_bytes <= 0 or len(each.digests) % DIGEST_BYTES for each in parts):
            raise ValueError("a blob has parts without bytes, or a part of a digest")
    except PARSE_ERRORS as error:
        raise CorruptDataError(f"{name} has invalid digests of the parts of blobs: {error!r}") from error
    return parts


def _decode_batch(row: dict[str, Any]) -> BatchLayout:
    # Without a frame or a digest, the bytes of the batch could not be verified. A writer never stores both.
    if (row["frame"] is None) == (row["digest"] is None):
        raise ValueError("a record batch needs either a digest or a frame")
    message = ByteRange(row["offset"], row["length"])
    blobs = tuple(ByteRange(**span) for span in row["blobs"])
    if row["samples"] < 0:
        raise ValueError("a record batch has a negative number of samples")
    return BatchLayout(message, row["samples"], digest=row["digest"], frame=row["frame"], blobs=blobs)
