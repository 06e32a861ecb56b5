"""Memory of batches, used again once nobody holds it: fresh memory costs several times what filling it does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class BufferRing:
    """Buffers of one shape.

    Whoever holds a buffer, a view of it, or a tensor made of either, keeps it. Addresses do not count.

    Args:
        shape: of a buffer.
        dtype: of its values.
        keep: buffers that stay for use again; those beyond, held at the same time, are left to their holders.
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike, *, keep: int) -> None:
        self._shape, self._dtype, self._keep = shape, np.dtype(dtype), keep
        self._buffers: list[npt.NDArray[Any]] = []

    def take(self) -> npt.NDArray[Any]:
        """Return a buffer that nobody holds, with arbitrary values; take views of it for what is handed over."""
        free = _find(self._buffers, _REFERENCES_OF_A_FREE_BUFFER)
        if free is not None:
            return free
        fresh = np.empty(self._shape, self._dtype)
        if len(self._buffers) < self._keep:
            self._buffers.append(fresh)
        return fresh


def _find(buffers: Sequence[npt.NDArray[Any]], num_references: int) -> npt.NDArray[Any] | None:
    """Return the first buffer with so many references, the interpreter's own in this loop counted too."""
    for buffer in buffers:
        if sys.getrefcount(buffer) == num_references:
            return buffer
    return None


# That of the list, and those that the loop makes: how many these are differs between interpreters, so it is tried.
_REFERENCES_OF_A_FREE_BUFFER = next(count for count in range(1, 9) if _find([np.empty(0)], count) is not None)
