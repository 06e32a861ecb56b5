"""Page-locked host memory, for the `pin` methods of loaders. Copies from it to a GPU run asynchronously.

The memory comes from torch's caching allocator. The allocator keeps freed memory, so only the first batches allocate.
It reuses memory only when all copies from it are complete, even if the caller drops the batch earlier.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

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
