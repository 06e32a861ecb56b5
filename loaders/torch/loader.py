"""torch's `DataLoader` with a resumable state that counts the batches handed over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import BaseContext
from typing import Any

import torch.utils.data

from datasvc.errors import ConfigError
from datasvc.loaders.torch.dataset import Dataset
from datasvc.loaders.torch.iterable import IterableDataset
from datasvc.loaders.torch.sampler import OrderBatchSampler


class ResumableDataLoader(torch.utils.data.DataLoader[Any]):
    """A `DataLoader` in the access order, with a state: `for batch in loader` runs to the end of the epoch.

    The first `for` starts at the cursor that the data set or sampler has when the loader is created. From then on the
    loader uses only its own cursor, so load states into the loader. The loader moves the cursor of its sampler or
    data set, so two loaders must not share a sampler or an `IterableDataset`.

    In training, a new `for` continues after the last batch that was handed over, in the same epoch or at the start of
    the next one. In evaluation (`training=False`, or an order without a shuffle), each `for` starts at the first
    sample, unless a state was loaded since the last batch. The state counts batches handed over; it is independent of
    prefetched batches and of the number of workers. All loaders of datasvc have the same state format, so a state of
    any of them can be loaded into any other.

    Args:
        data: an `IterableDataset`, which has a batch size; or any map-style data set, together with `batches`.
        batches: the order of a map-style data set.
        num_workers: worker processes; 0: the samples are read in this process. This option and those below are passed
            to torch's `DataLoader`. Its other options, such as `shuffle`, are determined by the order.
        collate_fn: makes a batch from a list of samples.
        pin_memory: copy tensors into page-locked memory.
        timeout: seconds to wait for a batch of a worker; 0: no limit.
        worker_init_fn: called in each worker with its number.
        multiprocessing_context: how workers are started, such as "spawn"; None: the default of the platform.
        generator: torch generator that draws the seeds of the workers.
        prefetch_factor: batches that each worker prepares ahead; None: torch's default.
        persistent_workers: keep the workers from epoch to epoch.

    Raises:
        ConfigError: `batches` is missing, or is given with an iterable data set; or the two have different splits.
    """

    def __init__(
        self,
        data: IterableDataset | torch.utils.data.Dataset[Any],
        batches: OrderBatchSampler | None = None,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: BaseContext | str | None = None,
        generator: torch.Generator | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
    ) -> None:
        if isinstance(data, IterableDataset) and batches is None:
            self._source: IterableDataset | OrderBatchSampler = data
            batching: dict[str, Any] = {"batch_size": data.batch_size}
        elif isinstance(batches, OrderBatchSampler) and not isinstance(data, torch.utils.data.IterableDataset):
            if isinstance(data, Dataset):
                batches.order.check_split(data.split)
            self._source = batches
            batching = {"batch_sampler": batches}
        else:
            raise ConfigError(
                "expected a data set with an OrderBatchSampler, or only an IterableDataset of datasvc.loaders.torch; "
                f"got {type(data).__name__} and {type(batches).__name__}"
            )
        self._cursor = self._source.cursor
        self._num_loads = 0  # of states; a loop compares it, to end if a state was loaded inside of it
        self._is_loaded = True  # no batch was handed over since a state was loaded, or since the creation
        self._loop: object | None = None  # identifies the iterator that yielded the last batch; None: no loop runs
        super().__init__(
            data,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            **batching,
        )

    @property
    def _is_accelerate_prepared(self) -> bool:
        # Accelerate reads this first. It would make a loader without our order, position and state out of this one.
        raise ConfigError(
            "accelerator.prepare cannot prepare a ResumableDataLoader, which has the rank and the position of a run "
            "itself: leave it out of prepare, and move its batches to accelerator.device"
        )

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self._source.order.count_rank_batches()[0]

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0. A new `for` serves its remaining batches. See `Loader.epoch`."""
        return self._cursor[0] + (self._loop is None and self._is_served)  # True adds 1

    def __repr__(self) -> str:
        return f"ResumableDataLoader({self._source.order}, epoch {self.epoch}, num_workers={self.num_workers})"

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the remaining batches of the epoch; if none remain, those of the next epoch. In evaluation, all.

        Errors of reads and transforms are raised here, also those of workers.
        """
        if self._is_served:
            self._cursor = (self._cursor[0] + 1, 0)
        training = self._source.order.is_training
        # Move the sampler or data set to the loader's cursor. Their cursors may differ, as after `load_state_dict`.
        epoch, position = self._cursor
        if not training and not self._is_loaded:
            position = 0
        num_loads = self._num_loads
        self._source.seek(epoch, position)
        loop = object()
        try:
            for batch in super().__iter__():
                step = self._source.order.step_at(position)
                assert step is not None
                position = step.next_position
                self._cursor, self._loop, self._is_loaded = (epoch, position), loop, False
                yield batch
                # A state was loaded in the loop, or another loop of the training continued: the batches in progress
                # belong to the old position.
                if self._num_loads != num_loads or (training and self._cursor != (epoch, position)):
                    return
        finally:
            if self._loop is loop:  # otherwise another iterator has begun since, and this one is closed late
                self._loop = None
        self._cursor = (epoch + 1, 0)

    @property
    def _is_served(self) -> bool:
        """Whether no step of the cursor's epoch is left, on any rank."""
        return self._source.order.step_at(self._cursor[1]) is None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run after the batches handed over so far, as JSON values."""
        return self._source.order.state_at(*self._cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that was saved with any world size, batch size and number of workers.

        Args:
            state: state of any loader of datasvc, or of a `StatefulDataLoader` over the same samples.

        Raises:
            ConfigError: `state` is no loader state, or has a later format.
            StateMismatchError: the state belongs to another version or order; the message has both.
        """
        self._cursor, self._loop = self._source.order.parse_state(state), None
        self._num_loads += 1
        self._is_loaded = True
