"""Records what torch's own `DataLoader` hands over, so that the versions of a `CheckpointManager` name their data.

Workers read and samplers draw ahead of the training loop. So batches are counted where the loop takes them: in the
iterator that `iter(loader)` returns. Only loaders in an access order of datasvc are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch.utils.data

from datasvc.ledger.handed_over import HandedOrder, HandedRange, record_batch
from datasvc.loaders.torch.iterable import IterableDataset
from datasvc.loaders.torch.sampler import OrderBatchSampler


class RecordedBatches(Iterator[Any]):
    """The iterator of a `DataLoader`, which records each batch that it returns."""

    def __init__(self, batches: Iterator[Any], source: OrderBatchSampler | IterableDataset) -> None:
        self._batches = batches
        self._order = source.order
        self._epoch, self._position = source.cursor
        split, order = self._order.split, self._order
        self._handed = HandedOrder(
            str(split.dataset), split.name, split.digest, order.config, order.masked, split.view
        )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        step = self._order.step_at(self._position)
        if step is not None:  # a subclass of the sampler may yield more batches than the order has
            start, self._position = self._position, step.next_position
            handed = HandedRange(
                (self._epoch, start),
                (self._epoch, self._position),
                self._order.global_batch,
                self._order.tail,
                self._order.step_at(self._position) is None,
            )
            record_batch(self._handed, handed)
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type] # torch's iterator has a length

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # a copy has no attributes at first
            raise AttributeError(name)
        return getattr(self._batches, name)  # such as what a framework uses of torch's iterator


def record_data_loaders() -> None:
    """Have each `DataLoader` in a training order of datasvc record its batches; other loaders are unchanged."""
    # Change the class: torch calls none of our objects in the main process when an iterable data set has workers.
    make_iterator = torch.utils.data.DataLoader.__iter__

    def iterate(loader: torch.utils.data.DataLoader[Any]) -> Any:
        source = _source_of(loader)
        batches = make_iterator(loader)
        return batches if source is None else RecordedBatches(batches, source)

    torch.utils.data.DataLoader.__iter__ = iterate  # type: ignore[method-assign]


def _source_of(loader: torch.utils.data.DataLoader[Any]) -> OrderBatchSampler | IterableDataset | None:
    """Return what has the order of a loader's batches; None if they are not the batches of a training order."""
    source: OrderBatchSampler | IterableDataset
    if isinstance(loader.batch_sampler, OrderBatchSampler):
        source = loader.batch_sampler
    elif isinstance(loader.dataset, IterableDataset) and loader.batch_size == loader.dataset.batch_size:
        source = loader.dataset
    else:
        return None
    return source if source.order.is_training and loader.in_order else None
