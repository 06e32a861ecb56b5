"""Buffer that collects the blobs or texts of one column of a record batch, reused for every batch of a shard.

`ShardWriter` has one for each such column. The buffer is reused because allocating new memory takes longer than
copying a blob. A blob that is read from its file directly into the buffer is not copied at all.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.shards.format.schema import offset_dtype


class BlobColumn:
    """The bytes of one column in a buffer of `initial_bytes`, which grows as needed and never shrinks."""

    def __init__(self, initial_bytes: int) -> None:
        self._buffer = np.empty(initial_bytes, np.uint8)
        self._view = self._buffer.data
        self._offsets = [0]  # start of each blob in the buffer, and the end of the last one
        self._nulls: list[int] = []  # rows that are null
        self._reserved: memoryview | None = None  # result of the last `reserve`

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Size of each blob in bytes: `int64[samples]`."""
        offsets = np.array(self._offsets, np.int64)
        return offsets[1:] - offsets[:-1]

    def reserve(self, size_bytes: int) -> memoryview:
        """Return the memory of the next blob. If the blob is written there, `append` does not copy it."""
        start = self._offsets[-1]
        stop = start + size_bytes
        if stop > len(self._view):
            # At least double the size, so that a growing buffer is copied only a few times.
            grown = np.empty(max(stop, 2 * len(self._buffer)), np.uint8)
            grown[:start] = self._buffer[:start]
            self._buffer, self._view = grown, grown.data
        self._reserved = reserved = self._view[start:stop]
        return reserved

    def append(self, blob: bytes | memoryview | npt.NDArray[np.uint8] | None) -> int:
        """Add a blob, None for null, and return its size in bytes. The result of the last `reserve` is not copied."""
        offsets = self._offsets
        if blob is None:
            self._nulls.append(len(offsets) - 1)
            offsets.append(offsets[-1])
            return 0
        # Compare by identity: only the memoryview that `reserve` returned has its bytes in the buffer already.
        if blob is not self._reserved:
            view = np.frombuffer(blob, np.uint8)
            self.reserve(len(view))[:] = view.data
        size_bytes = len(blob)
        offsets.append(offsets[-1] + size_bytes)
        self._reserved = None
        return size_bytes

    def take(self, data_type: pa.DataType) -> pa.Array:
        """Return the blobs as an array, which is valid until the next `append`, and start an empty column."""
        count = len(self._offsets) - 1
        offsets = pa.py_buffer(np.array(self._offsets, offset_dtype(data_type)))
        content = pa.py_buffer(self._buffer[: self._offsets[-1]])
        array = pa.Array.from_buffers(data_type, count, [_validity(count, self._nulls), offsets, content])
        # The next batch overwrites the buffer, so the caller must write this batch before the next `append`.
        self._offsets, self._nulls, self._reserved = [0], [], None
        return array


def _validity(count: int, nulls: list[int]) -> pa.Buffer | None:
    """Return Arrow's validity bitmap, one bit per value, lowest bit first; None if no row is null."""
    if not nulls:
        return None
    valid = np.ones(count, np.bool_)
    valid[nulls] = False
    return pa.py_buffer(np.packbits(valid, bitorder="little"))
