"""Reuses the memory of a batch after its last reference is gone: allocating memory takes longer than filling it.

The decoders of images and tokens take the memory of their batches from a ring.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class BufferRing:
    """Reusable buffers of one shape.

    A buffer is in use while a reference to it, to a view of it, or to a tensor of its memory exists. A raw address
    does not count as a reference.

    Args:
        shape: shape of a buffer.
        dtype: dtype of a buffer.
        keep: maximum number of buffers that are reused; further buffers are freed after their last reference.
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike, *, keep: int) -> None:
        self._shape, self._dtype, self._keep = shape, np.dtype(dtype), keep
        self._buffers: list[npt.NDArray[Any]] = []

    def take(self) -> npt.NDArray[Any]:
        """Return an unused buffer with arbitrary values."""
        if (unused := _find(self._buffers, _REFERENCES_OF_AN_UNUSED_BUFFER)) is not None:
            return unused
        buffer = np.empty(self._shape, self._dtype)
        if len(self._buffers) < self._keep:
            self._buffers.append(buffer)
        return buffer


def _find(buffers: Sequence[npt.NDArray[Any]], num_references: int) -> npt.NDArray[Any] | None:
    """Return the first buffer with `num_references` references, which include those that this loop makes."""
    for buffer in buffers:
        if sys.getrefcount(buffer) == num_references:
            return buffer
    return None


# Only the list and the loop in `_find` reference an unused buffer. How many references these are depends on the
# interpreter, so the number is measured here.
_REFERENCES_OF_AN_UNUSED_BUFFER = next(count for count in range(1, 9) if _find([np.empty(0)], count) is not None)
