"""Page-locked host memory, from which copies to a GPU run asynchronously; used by the `pin` methods of loaders.

The memory comes from torch's caching allocator. The allocator keeps freed memory, so only the first batches allocate.
It reuses memory only after all copies from this memory are done, even if the caller drops the batch earlier.
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
    """Warn if torch finds no GPU, so that memory is not pinned; torch's `DataLoader(pin_memory=True)` also warns."""
    if not can_pin():
        warnings.warn(
            "torch finds no GPU, so the batches of pin() are in ordinary memory", RuntimeWarning, stacklevel=3
        )


def empty_pinned(shape: Sequence[int], dtype: np.dtype[Any]) -> torch.Tensor:
    """Return page-locked memory with arbitrary values; ordinary memory without a GPU."""
    import torch

    return torch.empty(tuple(shape), dtype=torch.from_numpy(np.empty(0, dtype)).dtype, pin_memory=can_pin())
