"""Page-locked memory of the host, from which copies to a GPU run beside the program.

It is torch's: its allocator keeps what is freed, so a run allocates for its first batches only, and gives memory out
again only when the copies that read it are done, even of a batch that was dropped before.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

    from datasvc.loaders.core.batches import SampleBatch
    from datasvc.loaders.core.loader import BatchDecoder

B = TypeVar("B")


def can_pin() -> bool:
    """Return whether memory can be page-locked here: torch does it for a GPU."""
    import torch

    return torch.cuda.is_available()


def warn_without_gpu() -> None:
    """Warn where `pin` can do nothing, as torch's `DataLoader(pin_memory=True)` does."""
    if not can_pin():
        warnings.warn(
            "pin() finds no GPU that torch can use: batches lie in ordinary memory", RuntimeWarning, stacklevel=3
        )


def empty_pinned(shape: Sequence[int], dtype: np.dtype[Any]) -> torch.Tensor:
    """Return page-locked memory with arbitrary values; ordinary memory where no GPU is."""
    import torch

    return torch.empty(tuple(shape), dtype=torch.from_numpy(np.empty(0, dtype)).dtype, pin_memory=can_pin())


def pin(value: Any) -> Any:
    """Return a tensor in page-locked memory, copied unless it is there; a mapping likewise; all else as it is."""
    import torch

    if isinstance(value, Mapping):
        return {name: pin(each) for name, each in value.items()}
    if isinstance(value, torch.Tensor) and can_pin():
        return value.pin_memory()
    return value


def pin_batch(batch: B) -> B:
    """Return a batch, a dataclass, whose tensors are in page-locked memory."""
    fields = dataclasses.fields(batch)  # type: ignore[arg-type]  # every batch is a dataclass
    changed = {field.name: pin(getattr(batch, field.name)) for field in fields}
    return dataclasses.replace(batch, **changed)  # type: ignore[type-var]  # likewise


class PinnedDecoder(Generic[B]):
    """A `BatchDecoder` whose batches are in page-locked memory: what `inner` did not decode there is copied.

    Args:
        inner: decodes; its batches are dataclasses of tensors.
    """

    def __init__(self, inner: BatchDecoder[B]) -> None:
        self._inner = inner

    def feed(self, batch: SampleBatch) -> None:
        """See `BatchDecoder`."""
        self._inner.feed(batch)

    def take(self) -> B:
        """See `BatchDecoder`."""
        return pin_batch(self._inner.take())

    def close(self) -> None:
        """See `BatchDecoder`."""
        self._inner.close()
