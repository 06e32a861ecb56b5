"""The samples of a split in the access order as an iterable data set of torch: workers take turns at its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.utils.data

from datasvc.errors import ConfigError
from datasvc.loaders.torch.dataset import Dataset
from datasvc.loaders.torch.rank_order import RankOrder
from datasvc.loaders.torch.sampler import OrderBatchSampler, check_epoch
from datasvc.loaders.torch.share import DrawnBatches


class IterableDataset(torch.utils.data.IterableDataset[Any]):
    """One rank's samples, epoch by epoch: `DataLoader(IterableDataset(dataset, batches), batch_size=...)`.

    The loader's `batch_size` must be that of `batches`: then its batches are the same, in the same sequence, with any
    number of workers. A `for` starts where `set_epoch` or `load_state_dict` said, in workers too, persistent ones
    included, and runs to the end of the epoch. `ResumableDataLoader` and torchdata's `StatefulDataLoader` keep what
    was served; with torch's own loader call `set_epoch` before each epoch.

    Args:
        dataset: reads and transforms samples.
        batches: which, in what order, and from where on: it starts where they do.

    Raises:
        ConfigError: the two are of different splits.
    """

    def __init__(self, dataset: Dataset, batches: OrderBatchSampler) -> None:
        if dataset.split.digest != batches.order.split.digest:
            raise ConfigError(f"the data set is of {dataset.split!r}, the batches are of {batches.order.split!r}")
        self.dataset = dataset
        self.order: RankOrder = batches.order
        # Epoch and position in memory that workers share, so that those that outlive an epoch see the next.
        self._start: torch.Tensor = torch.tensor(batches.cursor).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def batch_size(self) -> int:
        """Samples of a batch: what the loader is to be given."""
        return self.order.batch_size

    @property
    def epoch(self) -> int:
        """The epoch of which a `for` yields the rest."""
        return self.cursor[0]

    @property
    def cursor(self) -> tuple[int, int]:
        """Epoch and position where a `for` starts."""
        epoch, position = self._start.tolist()
        return epoch, position

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch."""
        return self.order.count_own()[1]

    def __iter__(self) -> ServedSamples:
        epoch, position = self.cursor
        info = torch.utils.data.get_worker_info()
        worker, num_workers = (0, 0) if info is None else (info.id, info.num_workers)
        batches = DrawnBatches(self.order, epoch, position, worker=worker, num_workers=num_workers)
        return ServedSamples(self.dataset, batches)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._start.is_shared():  # type: ignore[no-untyped-call]  # it came by plain pickle
            self._start.share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """See `OrderBatchSampler.set_epoch`."""
        check_epoch(epoch)
        if epoch != self.epoch:
            self.seek(epoch, 0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `OrderBatchSampler.load_state_dict`."""
        self.seek(*self.order.parse_state(state))

    def seek(self, epoch: int, position: int) -> None:
        """Let a `for` start at a position of an epoch."""
        self._start.copy_(torch.tensor([epoch, position]))


class ServedSamples(Iterator[Any]):
    """Samples one by one, read a batch at a time; its state stands between batches.

    Args:
        dataset: reads and transforms them.
        batches: to be served.
    """

    def __init__(self, dataset: Dataset, batches: DrawnBatches) -> None:
        self._dataset = dataset
        self._batches = batches
        self._left: list[Any] = []

    def __next__(self) -> Any:
        if not self._left:
            self._left = self._dataset.__getitems__(next(self._batches))[::-1]
        return self._left.pop()

    def state_dict(self) -> dict[str, Any]:
        """Return where this process stands; see `DrawnBatches.state_dict`.

        Raises:
            ConfigError: inside a batch: the loader's batches are not those of the order.
        """
        if self._left:
            raise ConfigError(
                f"a state was asked for with {len(self._left)} samples left of a batch; give the loader the "
                "batch_size of its data set, dataset.batch_size, or save between batches"
            )
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; see `DrawnBatches.load_state_dict`."""
        self._left = []
        self._batches.load_state_dict(state)
