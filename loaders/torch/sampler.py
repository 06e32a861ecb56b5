"""Batch sampler for torch's `DataLoader` that yields sample numbers in the access order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch.utils.data

from datasvc.cache.prefetch.window_budget import BatchesAtOnce
from datasvc.errors import ConfigError
from datasvc.loaders.core.derived_order import derive_windowed
from datasvc.loaders.core.loader import check_sizes, choose_order
from datasvc.loaders.core.mixture import check_samples
from datasvc.loaders.ranks.data_ranks import DataRanks, choose_data_ranks
from datasvc.loaders.torch.dataset import Dataset
from datasvc.loaders.torch.drawn_batches import DrawnBatches
from datasvc.loaders.torch.rank_order import RankOrder
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
