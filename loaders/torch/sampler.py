"""Batch sampler for torch's `DataLoader` that yields sample numbers in the access order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import torch.utils.data

from datasvc.cache.prefetch.window_budget import BatchesAtOnce
from datasvc.errors import ConfigError
from datasvc.ledger.masked import NOTHING_MASKED, Masked
from datasvc.loaders.core.arguments import check_sizes, choose_order
from datasvc.loaders.core.derived_order import derive_windowed
from datasvc.loaders.core.mixture import check_samples
from datasvc.loaders.ranks.data_ranks import DataRanks, choose_data_ranks
from datasvc.loaders.torch.dataset import Dataset
from datasvc.loaders.torch.rank_order import RankOrder
from datasvc.loaders.torch.states import DrawState
from datasvc.order import OrderConfig, Shuffle, Tail, parse_tail
from datasvc.shards import Split

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class OrderBatchSampler(torch.utils.data.Sampler[list[int]]):
    """One rank's batches of an epoch, as lists of `ServedIndex`: `DataLoader(dataset, batch_sampler=batches)`.

    A `for` starts at the cursor that `set_epoch` or `load_state_dict` has set, and runs to the end of the epoch. It
    does not move the cursor, because loaders draw batches long before they serve them. `ResumableDataLoader` and
    torchdata's `StatefulDataLoader` count the batches served. For torch's own, call `set_epoch` before each epoch.

    Args:
        data: a split, or a `Dataset` of a split.
        batch_size: samples of this rank per step.
        seed, order, ranks: see `Loader`.
        shuffle: "global", None (order of the shard table), or "windowed", see `Loader`; "auto" means "global".
        tail: treatment of the last samples if they do not fill a global batch: "drop", "short" or "pad". With "pad",
            samples have a `mask`, which is False for padding. With "short", some ranks may get one batch fewer.
        training: whether a model is trained on these samples. If so, the versions that a `CheckpointManager` saves
            record those that torch's `DataLoader` has handed over. None: if the order shuffles.
        masked: samples whose `mask` is False, see `Masked`; the states of a loader have them. A sample is served as
            usual, so let the loss leave it out.

    Raises:
        ConfigError: an argument is out of range; a batch is larger than the epoch with `tail="drop"`.
    """

    def __init__(
        self,
        data: Split | Dataset,
        *,
        batch_size: int,
        seed: int | None = None,
        shuffle: Shuffle | Literal["auto"] = "auto",
        order: OrderConfig | None = None,
        ranks: DataRanks | DeviceMesh | None = None,
        tail: Tail = "drop",
        training: bool | None = None,
        masked: Masked | None = None,
    ) -> None:
        check_sizes(batch_size=batch_size)
        self.batch_size = batch_size
        split = data.split if isinstance(data, Dataset) else data
        check_samples(split, or_mixture=False)
        data_ranks = choose_data_ranks(ranks)
        batches = BatchesAtOnce(batch_size, data_ranks.world_size, tail=parse_tail(tail))

        def derive(checked_seed: int) -> OrderConfig:
            # None stands for no cache: the budget of a cache does not limit the order of a sampler.
            return derive_windowed(split, None, data_ranks, batches, seed=checked_seed)

        # `training=True` makes "auto" the global shuffle.
        config = choose_order(order, seed=seed, shuffle=shuffle, training=True, derive=derive)
        self.order = RankOrder(
            split,
            config,
            batch_size=batch_size,
            ranks=data_ranks,
            tail=batches.tail,
            is_derived=order is None and shuffle == "windowed",
            is_training=config.shuffle is not None if training is None else training,
            ranks_are_found=ranks is None,
            masked=masked or NOTHING_MASKED,
        )
        self._epoch, self._position = 0, 0

    @property
    def epoch(self) -> int:
        """The epoch in which a `for` starts."""
        return self._epoch

    @property
    def cursor(self) -> tuple[int, int]:
        """Epoch and position at which a `for` starts."""
        return self._epoch, self._position

    @property
    def drop_last(self) -> bool:
        """Always False: `tail` says what happens to the last samples.

        Accelerate reads it from a batch sampler that it is about to divide among the ranks. Raises ConfigError: the
        order has ranks already, so that most samples would be lost.
        """
        self.order.check_undivided()
        return False

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self.order.count_rank_batches()[0]

    def __repr__(self) -> str:
        return f"OrderBatchSampler({self.order})"

    def __iter__(self) -> DrawnBatches:
        self.order.check_group()
        return DrawnBatches(self.order, self._epoch, self._position)

    def set_epoch(self, epoch: int) -> None:
        """Move the cursor to the beginning of an epoch, unless the cursor is in that epoch already.

        Raises:
            ConfigError: `epoch` is below 0.
        """
        check_epoch(epoch)
        if epoch != self._epoch:
            self.seek(epoch, 0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor to that of a state that was saved with any world size, batch size and number of workers.

        Args:
            state: any state that `order_state` accepts.

        Raises:
            ConfigError: `state` is no loader state, or has a later format.
            StateMismatchError: the state belongs to another version or order; the message has both.
        """
        self.seek(*self.order.parse_state(state))

    def seek(self, epoch: int, position: int) -> None:
        """Set the epoch and position at which a `for` starts."""
        self._epoch, self._position = epoch, position


def check_epoch(epoch: int) -> None:
    """Raise ConfigError if `epoch` is below 0."""
    if epoch < 0:
        raise ConfigError(f"epoch is {epoch}; expected 0 or more")


# To draw a batch is to compute its sample numbers. A data set reads the samples later. For an `OrderBatchSampler`,
# the main process draws all batches of its rank. For an `IterableDataset`, each of n workers draws every n-th batch.


class DrawnBatches(Iterator[list[int]]):
    """One rank's batches of an epoch from a position on, or one worker's part of them.

    torch's loaders take batches from their workers in turn, beginning with worker 0. So worker w of W draws the steps
    w, w + W, ..., counted from the loader's start, and the loader's batches do not depend on the number of workers.

    Args:
        order: the rank's part of the access order.
        epoch: epoch to draw from.
        position: position at which the loader starts.
        worker: index of this worker.
        num_workers: number of workers; 0: one process draws all steps.
    """

    def __init__(self, order: RankOrder, epoch: int, position: int, *, worker: int = 0, num_workers: int = 0) -> None:
        self._order = order
        self._worker, self._num_workers = worker, num_workers
        self._num_batches = 0  # number of batches that this process has drawn
        self._epoch, self._start = epoch, position
        # Position at which the next step of this process starts; the end of the epoch if there is no step.
        self._position = self._clamp_to_epoch(position + self._worker * order.global_batch)

    def __next__(self) -> list[int]:
        step = self._order.step_at(self._position)
        indices = [] if step is None else self._order.indices(self._epoch, step)
        if not indices:  # the last step may be so short that this rank has no sample in it
            self._position = self._order.num_samples
            raise StopIteration
        self._position = self._clamp_to_epoch(self._position + max(self._num_workers, 1) * self._order.global_batch)
        self._num_batches += 1
        return indices

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process, as JSON values. `order_state` combines the states of all processes."""
        state = DrawState(
            position=self._position,
            worker=self._worker,
            num_workers=self._num_workers,
            num_batches=self._num_batches,
            global_batch=self._order.global_batch,
            num_samples=self._order.num_samples,
            order=self._order.state_at(self._epoch, self._start),
        )
        return asdict(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same worker, with the same number of workers.

        Raises:
            ConfigError: `state` is not from `state_dict`, or belongs to another worker or number of workers.
            StateMismatchError: the state belongs to another version or order; the message has both.
        """
        saved = DrawState.from_dict(state)
        if (saved.worker, saved.num_workers) != (self._worker, self._num_workers):
            raise ConfigError(
                f"the state belongs to worker {saved.worker} of {saved.num_workers}, and this is worker "
                f"{self._worker} of {self._num_workers}; load order_state(STATE), with the state of the loader, into "
                "the data set or sampler instead"
            )
        self._epoch, self._start = self._order.parse_state(saved.order)
        self._position, self._num_batches = saved.position, saved.num_batches

    def _clamp_to_epoch(self, position: int) -> int:
        return min(position, self._order.num_samples)
