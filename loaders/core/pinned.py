"""Page-locked host memory, for the `pin` methods of loaders. Copies from it to a GPU run asynchronously.

The memory comes from torch's caching allocator. The allocator keeps freed memory, so only the first batches allocate.
It reuses memory only when all copies from it are complete, even if the caller drops the batch earlier.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


def can_pin() -> bool:
    """Return whether torch can page-lock memory, which needs a GPU."""
    import torch

    return torch.cuda.is_available()


def warn_without_gpu() -> None:
    """Warn, as torch's `DataLoader(pin_memory=True)` does, if memory cannot be pinned because torch finds no GPU."""
    if not can_pin():
        warnings.warn(
            "torch finds no GPU, so the batches of pin() are in ordinary memory", RuntimeWarning, stacklevel=3
        )


def empty_pinned(shape: Sequence[int], dtype: np.dtype[Any]) -> torch.Tensor:
    """Return page-locked memory with arbitrary values; ordinary memory without a GPU."""
    import torch

    with torch.inference_mode(mode=False):  # the memory is used again outside of it
        return torch.empty(
            tuple(shape), dtype=torch.from_numpy(np.empty(0, dtype)).dtype, pin_memory=can_pin(), device="cpu"
        )


# The decoders of images and tokens take the memory of their batches from a ring.


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
