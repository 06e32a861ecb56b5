"""Base class of loaders whose decoders make NumPy arrays, which become tensors when a batch is handed over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from datasvc.extras import explain_missing
from datasvc.loaders.core.batch import Batch, register_tree
from datasvc.loaders.core.loader import Loader
from datasvc.loaders.core.pinned import warn_without_gpu

B = TypeVar("B", bound=Batch[Any])


class ArrayLoader(Loader[B]):
    """Batches of a split as tensors on the CPU, in page-locked memory, or as NumPy arrays; see `Loader`."""

    _convert: Callable[[Any], Any] | None = None  # how `_deliver` converts the batch that is asked for

    def __iter__(self) -> Iterator[B]:
        """Yield the remaining batches of the epoch as tensors on the CPU. For details see `Loader.__iter__`."""
        return super().__iter__()

    def numpy(self) -> Iterator[B]:
        """Yield the remaining batches of the epoch as NumPy arrays, without importing torch."""
        return self._serve(lambda batch: batch)

    def pin(self) -> Iterator[B]:
        """Yield the remaining batches of the epoch in page-locked memory, see `ImageLoader.pin`."""
        warn_without_gpu()
        return self._serve(lambda batch: to_torch(batch).pin_memory())

    def _serve(self, convert: Callable[[B], B]) -> Iterator[B]:
        """Yield the remaining batches of the epoch, each converted by `convert`."""
        batches = super().__iter__()
        while True:
            # Set `self._convert`, which `_deliver` calls, for this batch only: all iterators of this loader share it,
            # and the caller may alternate between `numpy()` and `pin()`.
            self._convert = convert
            try:
                batch = next(batches, None)
            finally:
                self._convert = None
            if batch is None:
                return
            yield batch

    def _deliver(self, decoded: B) -> B:
        converted: B = (self._convert or to_torch)(decoded)
        return converted


def to_torch(batch: B) -> B:
    """Return the batch with tensors that use the arrays' memory, in `columns` too; `positions` stays an array."""
    with explain_missing("a loader that yields tensors (its numpy() yields arrays)"):
        import torch

    register_tree(type(batch))

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: convert(each) for name, each in value.items()}
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else value

    fields = {name: convert(value) for name, value in vars(batch).items() if name not in {"positions", "places"}}
    return dataclasses.replace(batch, **fields)  # type: ignore[type-var]  # every batch is a dataclass
