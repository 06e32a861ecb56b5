"""An Arrow IPC file on its way to a sink, which remembers where its record batches came to lie.

Nothing is read again or copied for it: what Arrow writes passes by piece by piece, and blobs are recognised by their
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

import pyarrow as pa
from xxhash import xxh3_128

from datasvc.shards.format.layout import BatchLayout, ByteRange, ShardLayout
from datasvc.shards.format.schema import is_blob

# "ARROW1" and padding, in front of the schema.
_MAGIC_BYTES: Final = 8
# A frame that is a larger share of its message than this is not kept: the index stays small beside the shard.
_FRAME_SHARE: Final = 32
# A record batch is a dozen pieces, nearly all of them a few bytes: a call of the sink for each would cost more.
_SMALL_BYTES: Final = 4096

Piece: TypeAlias = pa.Buffer | bytes


class ByteSink(Protocol):
    """Where a shard's bytes go, such as an `ObjectWriter`."""

    def write(self, content: bytes | memoryview, /) -> int:
        """Append `content`."""


class RecordedFile:
    """Writes an Arrow IPC file.

    Args:
        sink: receives the file's bytes in order.
        schema: of every record batch; no dictionaries.
    """

    def __init__(self, sink: ByteSink, schema: pa.Schema) -> None:
        self._schema = schema
        self._pieces = _Pieces(sink)
        self._file = pa.ipc.new_file(pa.PythonFile(self._pieces, mode="w"), schema)
        self._blobs = [number for number, field in enumerate(schema) if is_blob(field.type)]
        self._batches: list[BatchLayout] = []

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Append a record batch. Raises what the sink raises."""
        start_bytes = self._pieces.size_bytes
        self._file.write_batch(batch)
        pieces = self._pieces.take()
        if not self._batches:
            # Arrow writes what stands before the first record batch only now.
            before_bytes = _MAGIC_BYTES + self._schema.serialize().size
            while start_bytes < before_bytes:
                start_bytes += len(pieces.pop(0))
            assert start_bytes == before_bytes, (start_bytes, before_bytes)
        blobs = [batch.column(number).buffers()[2] for number in self._blobs]
        self._batches.append(describe_batch(pieces, start_bytes, blobs, batch.num_rows))

    def close(self) -> None:
        """Write the file's footer."""
        self._file.close()
        self._pieces.flush()

    @property
    def layout(self) -> ShardLayout:
        """Where the record batches written so far lie."""
        return ShardLayout(self._schema, tuple(self._batches))


def describe_batch(
    pieces: Sequence[Piece], offset: int, blobs: Sequence[pa.Buffer | None], num_samples: int
) -> BatchLayout:
    """Return the layout of a record batch from what Arrow has just written of it.

    Args:
        pieces: the message, piece by piece; buffers are still what they were when they were written.
        offset: of the message in the file.
        blobs: the buffer that holds the bytes of each blob column; None for no bytes.
        num_samples: of the batch.
    """
    # Arrow passes a column's buffer on as it is: the same memory is the same bytes.
    held = [(blob.address, blob.size) if blob is not None and blob.size else None for blob in blobs]
    places: dict[tuple[int, int], ByteRange] = {}
    frame: list[Piece] = []
    length = 0
    for piece in pieces:
        memory = (piece.address, piece.size) if isinstance(piece, pa.Buffer) else None
        if memory is not None and memory in held and memory not in places:
            places[memory] = ByteRange(length, len(piece))
        else:
            frame.append(piece)
        length += len(piece)
    message = ByteRange(offset, length)
    if set(places) == set(held) - {None} and sum(map(len, frame)) * _FRAME_SHARE <= length:
        spans = tuple(ByteRange(0, 0) if memory is None else places[memory] for memory in held)
        return BatchLayout(message, num_samples, frame=b"".join(map(memoryview, frame)), blobs=spans)
    digest = xxh3_128()
    for piece in pieces:
        digest.update(memoryview(piece))
    return BatchLayout(message, num_samples, digest=digest.digest())


class _Pieces:
    """What pyarrow asks of a Python file: passes pieces on, small ones together, and keeps each until it is taken."""

    closed = False

    def __init__(self, sink: ByteSink) -> None:
        self._sink = sink
        self._kept: list[Piece] = []
        self._small = bytearray()
        self.size_bytes = 0

    def write(self, content: Piece) -> int:
        view = memoryview(content)
        self._kept.append(content)
        self.size_bytes += view.nbytes
        if view.nbytes < _SMALL_BYTES:
            self._small += view
        else:
            self.flush()
            self._sink.write(view)
        return view.nbytes

    def take(self) -> list[Piece]:
        """Return what was written since the last call."""
        pieces, self._kept = self._kept, []
        return pieces

    def flush(self) -> None:
        """Pass on what is left; the sink's owner syncs."""
        small, self._small = self._small, bytearray()
        if small:
            self._sink.write(memoryview(small))

    def close(self) -> None:
        self.closed = True
