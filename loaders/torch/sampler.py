"""Batches of sample numbers in the access order, for torch's loaders: the order stays in the main process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.utils.data

from datasvc.errors import ConfigError
from datasvc.loaders.core.data_ranks import choose_data_ranks
from datasvc.loaders.core.loader import check_sizes
from datasvc.loaders.torch.dataset import Dataset
from datasvc.loaders.torch.rank_order import RankOrder
from datasvc.loaders.torch.share import DrawnBatches
from datasvc.order import OrderConfig, Shuffle, Tail, parse_tail
from datasvc.shards import Split

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class OrderBatchSampler(torch.utils.data.Sampler[list[int]]):
    """One rank's batches of an epoch, as lists of `ServedIndex`: `DataLoader(dataset, batch_sampler=batches)`.

    A `for` starts where `set_epoch` or `load_state_dict` said, and runs to the end of the epoch. It changes nothing:
    loaders draw batches ahead, so what was drawn is not what was served. `ResumableDataLoader` and torchdata's
    `StatefulDataLoader` keep what was served; with torch's own loader call `set_epoch` before each epoch.

    Args:
        data: a split, or a data set of it.
        batch_size: samples of this rank per step.
        seed: of order and randomness.
        shuffle: "global", "windowed" or None.
        lanes: see `OrderConfig`.
        block: see `OrderConfig`.
        sticky: see `OrderConfig`.
        data_rank: of this process, with `data_world_size`: which part of each global batch it gets. Tensor- and
            pipeline-parallel peers give the same rank, and get the same batches.
        data_world_size: number of data ranks.
        mesh: a `torch.distributed` device mesh, instead of these two.
        mesh_axis: name of its data axis, where it has more than one.
        tail: "drop", "short" or "pad" where the last samples fill no global batch; with "pad", samples say in `mask`
            whether they count. With "short" and several ranks, a rank may get a batch less than others.

    Raises:
        ConfigError: an argument is out of range; a batch larger than the epoch with "drop".
    """

    def __init__(
        self,
        data: Split | Dataset,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: Shuffle = "global",
        lanes: int = 1,
        block: int | None = None,
        sticky: bool = False,
        data_rank: int | None = None,
        data_world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        mesh_axis: str | None = None,
        tail: Tail = "drop",
    ) -> None:
        check_sizes(batch_size=batch_size)
        self.batch_size = batch_size
        self.order = RankOrder(
            data.split if isinstance(data, Dataset) else data,
            OrderConfig(seed=seed, shuffle=shuffle, lanes=lanes, block=block, sticky=sticky),
            batch_size=batch_size,
            ranks=choose_data_ranks(data_rank, data_world_size, mesh, mesh_axis),
            tail=parse_tail(tail),
        )
        self._epoch, self._position = 0, 0

    @property
    def epoch(self) -> int:
        """The epoch of which a `for` yields the rest."""
        return self._epoch

    @property
    def cursor(self) -> tuple[int, int]:
        """Epoch and position where a `for` starts."""
        return self._epoch, self._position

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self.order.count_own()[0]

    def __iter__(self) -> DrawnBatches:
        return DrawnBatches(self.order, self._epoch, self._position)

    def set_epoch(self, epoch: int) -> None:
        """Let a `for` start at the beginning of an epoch; where a state was loaded of that epoch, it stays there.

        Raises:
            ConfigError: the epoch is below 0.
        """
        check_epoch(epoch)
        if epoch != self._epoch:
            self.seek(epoch, 0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let a `for` start where a run stood, saved at any world size, batch size and number of workers.

        Args:
            state: all that `order_state` takes.

        Raises:
            ConfigError: not a state, or one of a later format.
            StateMismatchError: it belongs to another version or order; says both.
        """
        self.seek(*self.order.parse_state(state))

    def seek(self, epoch: int, position: int) -> None:
        """Let a `for` start at a position of an epoch."""
        self._epoch, self._position = epoch, position


def check_epoch(epoch: int) -> None:
    """Raise ConfigError where an epoch is none."""
    if epoch < 0:
        raise ConfigError(f"epoch is {epoch}; expected 0 or more")
