"""Writes Arrow IPC files, and records the layout of each: the position of every record batch and of its blobs.

`ShardWriter` uses it, and the sample index stores the layout. To find the positions, no file is read again and
nothing is copied: Arrow writes a file in chunks of memory, and a chunk with blobs is recognised by its address.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

import pyarrow as pa
from xxhash import xxh3_128

from datasvc.shards.format.layout import BatchLayout, ByteRange, ShardLayout
from datasvc.shards.format.schema import is_blob

# Length of "ARROW1" and its padding, which precede the schema.
_MAGIC_BYTES: Final = 8
# The frame of a record batch is its message without the bytes of its blobs, see layout.py. A frame is stored only if
# the message is at least this many times as large, so that the sample index stays small.
_MIN_MESSAGE_PER_FRAME: Final = 32
# Smaller chunks are written together, because a record batch has a dozen chunks, most of them of a few bytes.
_SMALL_BYTES: Final = 4096

Chunk: TypeAlias = pa.Buffer | bytes


class ByteSink(Protocol):
    """Destination of a shard's bytes, such as an `ObjectWriter`."""

    def write(self, content: bytes | memoryview, /) -> int:
        """Append `content`."""


class IpcWriter:
    """Writes an Arrow IPC file and records its layout.

    Args:
        sink: receives the file's bytes in order.
        schema: schema of every record batch; without dictionary-encoded columns.
    """

    def __init__(self, sink: ByteSink, schema: pa.Schema) -> None:
        self._schema = schema
        self._chunks = _ChunkRecorder(sink)
        self._file = pa.ipc.new_file(pa.PythonFile(self._chunks, mode="w"), schema)
        self._blobs = [number for number, field in enumerate(schema) if is_blob(field.type)]
        self._batches: list[BatchLayout] = []

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Append a record batch. Raise what the sink raises."""
        start_bytes = self._chunks.size_bytes
        self._file.write_batch(batch)
        chunks = self._chunks.take_chunks()
        if not self._batches:
            # Arrow writes the file's header together with the first record batch; the header's chunks are left out.
            header_bytes = _MAGIC_BYTES + self._schema.serialize().size
            while start_bytes < header_bytes:
                start_bytes += len(chunks.pop(0))
            assert start_bytes == header_bytes, (start_bytes, header_bytes)
        blobs = [batch.column(number).buffers()[2] for number in self._blobs]
        self._batches.append(describe_batch(chunks, start_bytes, blobs, batch.num_rows))

    def close(self) -> None:
        """Write the file's footer."""
        self._file.close()
        self._chunks.flush()

    @property
    def layout(self) -> ShardLayout:
        """Layout of the record batches written so far."""
        return ShardLayout(self._schema, tuple(self._batches))


def describe_batch(
    chunks: Sequence[Chunk], offset: int, blobs: Sequence[pa.Buffer | None], num_samples: int
) -> BatchLayout:
    """Return the layout of a record batch.

    Args:
        chunks: the chunks that Arrow wrote for the batch; their memory must be unchanged.
        offset: byte position of the batch's message in the file.
        blobs: the buffer of each blob column, in the schema's order; None if it is empty.
        num_samples: number of samples of the batch.
    """
    # Arrow writes a column's buffer without a copy, so a chunk with the same address and size is that buffer.
    # A region is a pair (address, size), or None for an empty buffer.
    blob_regions = [(blob.address, blob.size) if blob is not None and blob.size else None for blob in blobs]
    blob_ranges: dict[tuple[int, int], ByteRange] = {}
    frame: list[Chunk] = []
    length = 0
    for chunk in chunks:
        region = (chunk.address, chunk.size) if isinstance(chunk, pa.Buffer) else None
        # If two columns share a region, the second chunk of the region makes the frame too large to be kept.
        if region is not None and region in blob_regions and region not in blob_ranges:
            blob_ranges[region] = ByteRange(length, len(chunk))
        else:
            frame.append(chunk)
        length += len(chunk)
    message = ByteRange(offset, length)
    # A frame is useful only if it is small and the position of every blob buffer is known.
    knows_all_blobs = set(blob_ranges) == set(blob_regions) - {None}
    if knows_all_blobs and sum(map(len, frame)) * _MIN_MESSAGE_PER_FRAME <= length:
        spans = tuple(ByteRange(0, 0) if region is None else blob_ranges[region] for region in blob_regions)
        return BatchLayout(message, num_samples, frame=b"".join(map(memoryview, frame)), blobs=spans)
    digest = xxh3_128()
    for chunk in chunks:
        digest.update(memoryview(chunk))
    return BatchLayout(message, num_samples, digest=digest.digest())


class _ChunkRecorder:
    """The file object that Arrow writes to. It forwards chunks to the sink, and also keeps them for `take_chunks`.

    `closed`, `write`, `flush` and `close` are the parts of a file's interface that Arrow uses.
    """

    closed = False

    def __init__(self, sink: ByteSink) -> None:
        self._sink = sink
        self._kept: list[Chunk] = []
        self._small = bytearray()
        self.size_bytes = 0

    def write(self, content: Chunk) -> int:
        view = memoryview(content)
        self._kept.append(content)
        self.size_bytes += view.nbytes
        if view.nbytes < _SMALL_BYTES:
            self._small += view
        else:
            self.flush()
            self._sink.write(view)
        return view.nbytes

    def take_chunks(self) -> list[Chunk]:
        """Return the chunks that were written since the last call."""
        chunks, self._kept = self._kept, []
        return chunks

    def flush(self) -> None:
        """Write the collected small chunks to the sink. The owner of the sink syncs the file."""
        small, self._small = self._small, bytearray()
        if small:
            self._sink.write(memoryview(small))

    def close(self) -> None:
        self.closed = True
