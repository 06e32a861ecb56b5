"""Record batches of which some columns are compressed, by the compression of buffers that Arrow's format defines.

In such a batch, each buffer begins with its size, or with -1 if it is stored as it is. Arrow's own writer compresses
all of them. This one compresses those of chosen columns, so that blobs and lists stay mapped, and blobs keep byte
ranges of their own. Every Arrow reader reads both.
See https://arrow.apache.org/docs/format/Columnar.html#compression.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Sequence
from typing import Final, TypeAlias

import pyarrow as pa

from datasvc.arrow_messages import MAX_EXPANSION, VERBATIM, Block, fill_batch, fill_footer, parse_batch
from datasvc.shards.format.schema import is_compressible

CODEC: Final = "zstd"
# Level 3 takes half of the time of level 6 and more for short texts, and reaches nearly its ratio.
_CODEC: Final = pa.Codec(CODEC, 3)
# A column that is not at least this many times smaller stays as it is: reading it costs no decoding then.
_MIN_RATIO: Final = 1.3
_MIN_SAVED_BYTES: Final = 4 << 10
_SIZE: Final = struct.Struct("<q")
_PREFIX: Final = struct.Struct("<4si")  # continuation mark, and length of the flatbuffer
_MARK: Final = b"\xff\xff\xff\xff"
_END: Final = _PREFIX.pack(_MARK, 0)
_TAIL: Final = struct.Struct("<i6s")  # length of the footer, and the magic number
_ALIGNMENT: Final = 8

Chunk: TypeAlias = pa.Buffer | bytes


class BatchCompressor:
    """Makes the messages of a file's record batches, and its footer.

    Args:
        schema: schema of the file; without dictionary-encoded columns.
        columns: columns that are compressed.
    """

    def __init__(self, schema: pa.Schema, columns: Collection[str]) -> None:
        self._schema = schema
        self._is_compressed = [name in columns for name in schema.names for _ in range(_count_buffers(schema, name))]
        # A message of the same schema with one row, from which a batch differs in numbers only.
        self._template = _flatbuffer(_write(schema, [_one_row(schema)], pa.ipc.IpcWriteOptions(compression=CODEC)))
        self._blocks: list[Block] = []

    def message(self, plain: Sequence[Chunk], offset: int) -> list[Chunk]:
        """Return the message of a record batch in chunks. A chunk that is not compressed is one of `plain`.

        Args:
            plain: the chunks that Arrow writes for the batch if nothing is compressed.
            offset: byte position of the message in the file.
        """
        flatbuffer, buffers = _split_message(plain)
        packed = [
            _compress(buffer) if is_compressed else _verbatim(buffer)
            for buffer, is_compressed in zip(buffers, self._is_compressed, strict=True)
        ]
        body: list[Chunk] = []
        spans: list[tuple[int, int]] = []
        position = 0
        for chunks in packed:
            length = sum(map(len, chunks))
            padding = -length % _ALIGNMENT
            spans.append((position, length))
            body += [*chunks, bytes(padding)] if padding else chunks
            position += length + padding
        missing = -(-sum(map(len, buffers)) // MAX_EXPANSION) - position
        if missing > 0:  # readers would refuse it
            body.append(bytes(missing + -(position + missing) % _ALIGNMENT))
            position += len(body[-1])
        header = parse_batch(flatbuffer)._replace(buffers=spans)
        metadata = _PREFIX.pack(_MARK, len(self._template)) + fill_batch(self._template, header, position)
        self._blocks.append(Block(offset, len(metadata), position))
        return [metadata, *body]

    def footer(self) -> bytes:
        """Return the end of the file, after all record batches."""
        content = memoryview(_write(self._schema, [_one_row(self._schema)] * len(self._blocks)))
        length, magic = _TAIL.unpack(content[-_TAIL.size :])
        footer = fill_footer(bytes(content[-_TAIL.size - length : -_TAIL.size]), self._blocks)
        return _END + footer + _TAIL.pack(length, magic)


def choose_columns(batch: pa.RecordBatch) -> tuple[str, ...]:
    """Return the columns of text and numbers that become at least 1.3 times smaller, measured on a record batch.

    Return none if they save less than 4 KiB together: each buffer of a batch with compression has a size more.
    """
    chosen: list[str] = []
    saved_bytes = 0
    for field in batch.schema:
        if is_compressible(field.type):
            message = _first_batch(_write(pa.schema([field]), [batch.select([field.name])]))
            spans = parse_batch(message.metadata.to_pybytes()).buffers
            buffers = [message.body.slice(*span) for span in spans]
            packed_bytes = sum(len(chunk) for buffer in buffers for chunk in _compress(buffer))
            plain_bytes = sum(map(len, buffers))
            if packed_bytes and plain_bytes >= _MIN_RATIO * packed_bytes:
                chosen.append(field.name)
                saved_bytes += plain_bytes - packed_bytes
    return tuple(chosen) if saved_bytes >= _MIN_SAVED_BYTES else ()


def _compress(buffer: Chunk) -> list[Chunk]:
    packed = _CODEC.compress(buffer) if len(buffer) else buffer
    return [_SIZE.pack(len(buffer)), packed] if len(packed) < len(buffer) else _verbatim(buffer)


def _verbatim(buffer: Chunk) -> list[Chunk]:
    return [VERBATIM, buffer] if len(buffer) else []


def _split_message(chunks: Sequence[Chunk]) -> tuple[bytes, list[Chunk]]:
    """Return the flatbuffer of the message of a record batch that Arrow has written, and its buffers."""
    remaining = iter(chunks)
    head = b""
    while len(head) < _PREFIX.size or len(head) < _PREFIX.size + _PREFIX.unpack_from(head)[1]:
        head += memoryview(next(remaining))
    # Arrow writes each buffer as a chunk, and padding as others.
    by_offset: dict[int, Chunk] = {}
    position = 0
    for chunk in remaining:
        by_offset[position] = chunk
        position += len(chunk)
    flatbuffer = head[_PREFIX.size :]
    spans = parse_batch(flatbuffer).buffers
    buffers = [by_offset[offset] if length else b"" for offset, length in spans]
    assert [len(buffer) for buffer in buffers] == [length for _, length in spans], "a buffer is not one chunk"
    return flatbuffer, buffers


def _count_buffers(schema: pa.Schema, name: str) -> int:
    """Return the number of buffers of a column and of what is nested in it."""
    only = pa.schema([schema.field(name)])
    return len(parse_batch(_flatbuffer(_write(only, [_one_row(only)]))).buffers)


def _one_row(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in schema], schema=schema)


def _write(
    schema: pa.Schema, batches: Sequence[pa.RecordBatch], options: pa.ipc.IpcWriteOptions | None = None
) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=options) as file:
        for batch in batches:
            file.write_batch(batch)
    return sink.getvalue()


def _flatbuffer(file: pa.Buffer) -> bytes:
    """Return the flatbuffer of the first record batch of a file."""
    return bytes(_first_batch(file).metadata.to_pybytes())


def _first_batch(file: pa.Buffer) -> pa.Message:
    messages: Iterator[pa.Message] = iter(pa.ipc.MessageReader.open_stream(pa.BufferReader(file.slice(_ALIGNMENT))))
    next(messages)  # the schema
    return next(messages)
