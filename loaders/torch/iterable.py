"""Iterable torch data set of a split's samples in the access order. The workers of a loader read its steps in turn.

It combines a `Dataset`, which reads the samples, with an `OrderBatchSampler`, which has the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.utils.data

from datasvc.errors import ConfigError
from datasvc.loaders.torch.dataset import Dataset
from datasvc.loaders.torch.rank_order import RankOrder
from datasvc.loaders.torch.sampler import DrawnBatches, OrderBatchSampler, check_epoch
from datasvc.printable import count_text


class IterableDataset(torch.utils.data.IterableDataset[Any]):
    """One rank's samples, epoch by epoch: `DataLoader(IterableDataset(dataset, batches), batch_size=...)`.

    The loader's `batch_size` must be that of `batches`. Then its batches and their sequence do not depend on the
    number of workers. A `for` starts at the cursor that `set_epoch` or `load_state_dict` has set, and runs to the end
    of the epoch. `ResumableDataLoader` and torchdata's `StatefulDataLoader` count the samples served. torch's own
    loader does not: call `set_epoch` before each epoch.

    Args:
        dataset: data set that reads and transforms samples.
        batches: batches and their order; iteration starts at their cursor.

    Raises:
        ConfigError: `dataset` and `batches` have different splits.
    """

    def __init__(self, dataset: Dataset, batches: OrderBatchSampler) -> None:
        batches.order.check_split(dataset.split)
        self.dataset = dataset
        self.order: RankOrder = batches.order
        # Epoch, position, lanes and block, in shared memory: persistent workers read them at the start of an epoch.
        # Lanes and block are included, because a state that is loaded later may replace those of a derived order.
        # The checksum of the masks too, so that a worker that has other masks reports this.
        start = torch.tensor(self._start_at(*batches.cursor), dtype=torch.int64, device="cpu")
        self._start: torch.Tensor = start.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def batch_size(self) -> int:
        """Samples of a batch; give this value to the loader."""
        return self.order.batch_size

    @property
    def epoch(self) -> int:
        """The epoch in which a `for` starts."""
        return self.cursor[0]

    @property
    def cursor(self) -> tuple[int, int]:
        """Epoch and position at which a `for` starts."""
        epoch, position = self._start[:2].tolist()
        return epoch, position

    @property
    def generator(self) -> None:
        """Always None; Accelerate reads it where it divides a data set. For the error see `OrderBatchSampler`."""
        self.order.check_undivided()

    def __len__(self) -> int:
        """Return the number of this rank's samples in an epoch."""
        return self.order.count_rank_batches()[1]

    def __repr__(self) -> str:
        return f"IterableDataset({self.order})"

    def __iter__(self) -> ServedSamples:
        self.order.check_group()
        epoch, position = self.cursor
        self.order.use_lanes_and_block(*self._start[2:4].tolist())
        info = torch.utils.data.get_worker_info()
        worker, num_workers = (0, 0) if info is None else (info.id, info.num_workers)
        batches = DrawnBatches(self.order, epoch, position, worker=worker, num_workers=num_workers)
        has_masks = self.order.masks_checksum == int(self._start[4])
        return ServedSamples(self.dataset, batches, has_masks=has_masks)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._start.is_shared():  # type: ignore[no-untyped-call]  # torch's pickling shares it, a plain pickle copies it
            self._start.share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Move the cursor to the beginning of an epoch, unless the cursor is in that epoch already.

        Raises:
            ConfigError: `epoch` is below 0.
        """
        check_epoch(epoch)
        if epoch != self.epoch:
            self.seek(epoch, 0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor to that of a state. For the accepted states and the errors see `OrderBatchSampler`."""
        self.seek(*self.order.parse_state(state))

    def seek(self, epoch: int, position: int) -> None:
        """Set the epoch and position at which a `for` starts."""
        self._start.copy_(torch.tensor(self._start_at(epoch, position), dtype=torch.int64, device="cpu"))

    def _start_at(self, epoch: int, position: int) -> list[int]:
        return [epoch, position, *self.order.lanes_and_block, self.order.masks_checksum]


class ServedSamples(Iterator[Any]):
    """Iterator over the single samples of drawn batches. Each process that reads has its own.

    It reads a batch at a time, and has a state only between batches. `has_masks` is False in a worker that masks
    other samples than the state that was loaded after its start.
    """

    def __init__(self, dataset: Dataset, batches: DrawnBatches, *, has_masks: bool = True) -> None:
        self._dataset, self._has_masks = dataset, has_masks
        self._batches = batches
        self._remaining: list[Any] = []  # samples of the current batch, in reverse order

    def __next__(self) -> Any:
        if not self._has_masks:  # raised here, because torch's worker ends at an error of `__iter__`
            raise ConfigError(
                "the state that was loaded masks other samples than this worker: load it before the first epoch, or "
                "give the loader persistent_workers=False"
            )
        if not self._remaining:
            self._remaining = self._dataset.__getitems__(next(self._batches))[::-1]
        return self._remaining.pop()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process, as JSON values. `order_state` combines the states of all processes.

        Raises:
            ConfigError: only a part of a batch is served, because the loader's batch size is not the order's.
        """
        if self._remaining:
            raise ConfigError(
                f"a state was requested with {count_text(len(self._remaining), 'sample')} left of a batch; "
                "give the loader the "
                "batch_size of its data set, dataset.batch_size, or save between batches"
            )
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same worker. For the errors see `DrawnBatches.load_state_dict`."""
        self._remaining = []
        self._batches.load_state_dict(state)
