"""Which samples one rank is served at each step, as numbers of its split: the same in every process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.loaders.core.data_ranks import DataRanks
from datasvc.loaders.torch.served import ServedIndex
from datasvc.loaders.torch.states import order_state
from datasvc.order import AccessOrder, OrderConfig, OrderState, Step, Tail, count_steps, plan_step, slice_step
from datasvc.shards import Split


class RankOrder:
    """One rank's part of an order.

    Args:
        split: the samples.
        config: the order's parameters.
        batch_size: samples of this rank per step.
        ranks: which part of each step it gets.
        tail: what becomes of the samples that fill no step.

    Raises:
        ConfigError: fewer samples than ranks, or no step at all.
    """

    def __init__(self, split: Split, config: OrderConfig, *, batch_size: int, ranks: DataRanks, tail: Tail) -> None:
        self.split = split
        self.config = config
        self.batch_size = batch_size
        self.ranks = ranks
        self.tail: Tail = tail
        self.num_samples = len(split)
        self.global_batch = batch_size * ranks.world_size
        self._laid_out: AccessOrder | None = None
        if self.num_samples < ranks.world_size:
            raise ConfigError(f"{split!r} has fewer samples than there are ranks: {ranks.world_size}")
        if not self.count_steps(0):
            raise ConfigError(
                f"{split!r} gives no full batch of {batch_size} x {ranks.world_size} ranks with "
                "tail='drop'; use smaller batches, or tail='pad'"
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_laid_out": None}

    def step_at(self, position: int) -> Step | None:
        """Return the step that starts at a position; None where the epoch has no further one."""
        return plan_step(position, self.num_samples, self.global_batch, self.tail)

    def count_steps(self, position: int) -> int:
        """Return how many steps there are from a position to the end of the epoch."""
        return count_steps(position, self.num_samples, self.global_batch, self.tail)

    def count_own(self) -> tuple[int, int]:
        """Return how many batches and how many samples this rank gets in an epoch: no batch is empty."""
        num_before = self.count_steps(0) - 1
        last = self.step_at(num_before * self.global_batch)
        assert last is not None
        size = len(self._part(last)[0])
        return num_before + bool(size), num_before * self.batch_size + size

    def indices(self, epoch: int, step: Step) -> list[int]:
        """Return this rank's samples of a step, each a `ServedIndex`; none where the last is too short for it."""
        positions, mask = self._part(step)
        order = self._order(epoch)
        shards, rows = order.locate(positions)
        numbers = self._first_numbers()[shards] + rows
        counts = mask.tolist() if self.tail == "pad" else [None] * len(mask)
        return [
            ServedIndex(number, self.config.seed, epoch, position, counted)
            for number, position, counted in zip(numbers.tolist(), positions.tolist(), counts, strict=True)
        ]

    def state_at(self, epoch: int, position: int) -> dict[str, Any]:
        """Return the state of a run that stands there; every other loader of this package takes it too."""
        return OrderState(self.split.digest, epoch, position, self.config).to_dict()

    def parse_state(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Return epoch and position of a state, see `order_state`.

        Raises:
            ConfigError: not a state, or one of a later format.
            StateMismatchError: it belongs to another version or order; says both.
        """
        found = OrderState.from_dict(order_state(state))
        found.check_matches(self.split.digest, self.config, self.num_samples)
        return found.epoch, found.position

    def _part(self, step: Step) -> tuple[Integers, npt.NDArray[np.bool_]]:
        return slice_step(step, rank=self.ranks.rank, world_size=self.ranks.world_size, lanes=self.config.lanes)

    def _order(self, epoch: int) -> AccessOrder:
        if self._laid_out is None or self._laid_out.epoch != epoch:
            self._laid_out = AccessOrder(self.split.table.samples_per_shard, self.config, epoch)
        return self._laid_out

    def _first_numbers(self) -> Integers:
        counts = self.split.table.samples_per_shard
        return np.cumsum(counts) - counts
