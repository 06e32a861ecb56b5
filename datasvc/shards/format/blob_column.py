"""Blobs or texts of the record batch being filled, end to end in one buffer that is used again for every batch.

Fresh memory costs more than the copy, and a blob that is read straight into its place costs no copy either.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa


class BlobColumn:
    """A column's bytes, in a buffer that only ever grows.

    Args:
        room_bytes: of the buffer at first.
    """

    def __init__(self, room_bytes: int) -> None:
        self._buffer = np.empty(room_bytes, np.uint8)
        self._view = self._buffer.data
        self._offsets = [0]
        self._nulls: list[int] = []
        self._room: memoryview | None = None

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of each blob: `int64[samples]`."""
        offsets = np.array(self._offsets, np.int64)
        return offsets[1:] - offsets[:-1]

    def room(self, size_bytes: int) -> memoryview:
        """Return where the next blob will lie: what is written there needs no copy when it is appended."""
        start = self._offsets[-1]
        stop = start + size_bytes
        if stop > len(self._view):
            grown = np.empty(max(stop, 2 * len(self._buffer)), np.uint8)
            grown[:start] = self._buffer[:start]
            self._buffer, self._view = grown, grown.data
        self._room = room = self._view[start:stop]
        return room

    def append(self, blob: bytes | memoryview | npt.NDArray[np.uint8] | None) -> int:
        """Add a blob, copied unless it is what `room` returned last; returns its size in bytes."""
        offsets = self._offsets
        if blob is None:
            self._nulls.append(len(offsets) - 1)
            offsets.append(offsets[-1])
            return 0
        if blob is not self._room:
            view = np.frombuffer(blob, np.uint8)
            self.room(len(view))[:] = view.data
        size_bytes = len(blob)
        offsets.append(offsets[-1] + size_bytes)
        self._room = None
        return size_bytes

    def take(self, data_type: pa.DataType) -> pa.Array:
        """Return the blobs as an array that is valid until the next `append`, and start over."""
        count = len(self._offsets) - 1
        is_large = pa.types.is_large_binary(data_type) or pa.types.is_large_string(data_type)
        offsets = pa.py_buffer(np.array(self._offsets, np.int64 if is_large else np.int32))
        content = pa.py_buffer(self._buffer[: self._offsets[-1]])
        array = pa.Array.from_buffers(data_type, count, [_validity(count, self._nulls), offsets, content])
        self._offsets, self._nulls, self._room = [0], [], None
        return array


def _validity(count: int, nulls: list[int]) -> pa.Buffer | None:
    if not nulls:
        return None
    valid = np.ones(count, np.bool_)
    valid[nulls] = False
    return pa.py_buffer(np.packbits(valid, bitorder="little"))
