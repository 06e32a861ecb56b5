"""Computes the samples that one rank gets at each step, for the sampler and data sets of this package.

The computation is a pure function of split, order, rank, epoch and step, so every process gets the same result.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.ledger.masked import NOTHING_MASKED, BatchMasks, Masked, masks_of, with_masks
from datasvc.loaders.core.arguments import check_num_steps
from datasvc.loaders.core.derived_order import order_of_state
from datasvc.loaders.core.mixture import purged_samples
from datasvc.loaders.core.state import name_split_table
from datasvc.loaders.ranks.data_ranks import DataRanks, check_group
from datasvc.loaders.torch.states import ServedIndex, order_state
from datasvc.order import AccessOrder, OrderConfig, OrderState, Step, Tail, count_steps, plan_step, slice_step
from datasvc.shards import Split


class RankOrder:
    """One rank's part of an access order.

    Args:
        split: split to read.
        config: parameters of the order.
        batch_size: samples of this rank per step.
        ranks: data rank of this process.
        tail: treatment of the last samples if they do not fill a global batch.
        is_derived: whether lanes and block were derived, not given by the user; then those of a state replace them.
        is_training: whether a model is trained on these samples.
        ranks_are_found: whether `ranks` were taken from the process group, not given by the user.
        masked: samples to mask; states add theirs.

    Raises:
        ConfigError: there are fewer samples than ranks, or an epoch has no step.
    """

    def __init__(
        self,
        split: Split,
        config: OrderConfig,
        *,
        batch_size: int,
        ranks: DataRanks,
        tail: Tail,
        is_derived: bool = False,
        is_training: bool = True,
        ranks_are_found: bool = False,
        masked: Masked = NOTHING_MASKED,
    ) -> None:
        self.split = split
        self.is_training = is_training
        self._ranks_are_found = ranks_are_found
        self._is_derived = is_derived
        self.config = config
        self.batch_size = batch_size
        self.ranks = ranks
        self.tail: Tail = tail
        self.num_samples = len(split)
        self.global_batch = batch_size * ranks.world_size
        self._epoch_order: AccessOrder | None = None
        self._masked_argument = masked | purged_samples(split)
        self._masks = BatchMasks(self._masked_argument)
        check_num_steps(split, batch_size=batch_size, world_size=ranks.world_size, tail=tail)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_epoch_order": None}  # large, and quick to compute again

    def __str__(self) -> str:
        ranks = f"data rank {self.ranks.rank} of {self.ranks.world_size}"
        return f"{self.split!r}, batch_size={self.batch_size}, training={self.is_training}, {ranks}"

    def step_at(self, position: int) -> Step | None:
        """Return the step that starts at a position; None if the epoch has no further step."""
        return plan_step(position, self.num_samples, self.global_batch, self.tail)

    def count_rank_batches(self) -> tuple[int, int]:
        """Return the number of this rank's non-empty batches in an epoch, and the number of its samples."""
        # All steps before the last one are full. In the last one, some ranks may have fewer samples, or none.
        num_before_last = count_steps(0, self.num_samples, self.global_batch, self.tail) - 1
        last = self.step_at(num_before_last * self.global_batch)
        assert last is not None
        last_size = len(self._part(last)[0])
        return num_before_last + bool(last_size), num_before_last * self.batch_size + last_size

    def indices(self, epoch: int, step: Step) -> list[int]:
        """Return this rank's samples of a step as `ServedIndex`; an empty list if the step has none for it."""
        positions, mask = self._part(step)
        order = self._order(epoch)
        shards, rows = order.locate(positions)
        numbers = self._first_numbers()[shards] + rows
        if self.masked:
            mask = mask & ~self._find_masked(epoch, positions, shards, rows)
        counts = mask.tolist() if self.tail == "pad" or self.masked else [None] * len(mask)
        return [
            ServedIndex(number, self.config.seed, epoch, position, counted)
            for number, position, counted in zip(numbers.tolist(), positions.tolist(), counts, strict=True)
        ]

    def check_group(self) -> None:
        """Raise ConfigError if the order was created without ranks, and the process group is now another one."""
        if self._ranks_are_found:
            check_group(self.ranks)

    def check_undivided(self) -> None:
        """Raise ConfigError if the order is one rank's part, which another library must not divide again."""
        if self.ranks.world_size > 1:
            raise ConfigError(
                f"the batches are those of rank {self.ranks.rank} of {self.ranks.world_size}, and "
                "accelerator.prepare would divide them among the ranks again: do not prepare the loader, or give "
                "ranks=DataRanks()"
            )

    def check_split(self, split: Split) -> None:
        """Raise ConfigError if a data set has another split than this order."""
        if split.digest != self.split.digest:
            raise ConfigError(f"the data set is of {split!r}, the batches are of {self.split!r}; give both one split")

    def state_at(self, epoch: int, position: int) -> dict[str, Any]:
        """Return the loader state at this cursor; all loaders of datasvc accept it."""
        return with_masks(OrderState(self.split.digest, epoch, position, self.config).to_dict(), self.masked)

    @property
    def masked(self) -> Masked:
        """The samples that are masked: those of the argument and of the state that was loaded, and purged ones."""
        return self._masks.masked

    def parse_state(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Return epoch and position of a state, and use its masks, and its lanes and block if the order is derived.

        Args:
            state: any state that `order_state` accepts.

        Raises:
            ConfigError: `state` is no loader state, or has a later format.
            StateMismatchError: the state belongs to another version or order; the message has both.
        """
        stored = order_state(state)
        parsed = OrderState.from_dict(stored)
        config = order_of_state(stored, self.config) if self._is_derived else self.config
        name_table = partial(name_split_table, self.split)
        parsed.check_matches(self.split.digest, config, self.num_samples, name_table=name_table)
        masked = masks_of(stored) | self._masked_argument.since((parsed.epoch, parsed.position))
        self._use(config)
        self._masks = BatchMasks(masked)
        return parsed.epoch, parsed.position

    @property
    def lanes_and_block(self) -> tuple[int, int]:
        """Lanes and block of the order; 0 stands for no block."""
        return self.config.lanes, self.config.block or 0

    @property
    def masks_checksum(self) -> int:
        """A number that differs if other samples are masked."""
        return zlib.crc32(json.dumps(self.masked.to_dict()).encode())

    def use_lanes_and_block(self, lanes: int, block: int) -> None:
        """Use the lanes and block of another process if the order is derived; otherwise they are the same already."""
        if self._is_derived:
            self._use(replace(self.config, lanes=lanes, block=block))

    def _use(self, config: OrderConfig) -> None:
        if config != self.config:
            self.config, self._epoch_order = config, None

    def _part(self, step: Step) -> tuple[Integers, npt.NDArray[np.bool_]]:
        """Return this rank's positions of a step, and whether each is a sample and not padding."""
        return slice_step(step, rank=self.ranks.rank, world_size=self.ranks.world_size, lanes=self.config.lanes)

    def _find_masked(
        self, epoch: int, positions: Integers, shards: Integers, rows: Integers
    ) -> npt.NDArray[np.bool_]:
        """Return which samples of a step are masked, for their places: `bool[n]`."""
        parts = []
        for shard in np.unique(shards).tolist():
            indices = np.flatnonzero(shards == shard)
            parts.append((self.split.digest, shard, indices, self.split.stored_rows(shard, rows[indices])))
        return self._masks.find(epoch, positions, parts)

    def _order(self, epoch: int) -> AccessOrder:
        if self._epoch_order is None or self._epoch_order.epoch != epoch:
            self._epoch_order = self.split.access_order(self.config, epoch)
        return self._epoch_order

    def _first_numbers(self) -> Integers:
        """Return the number of the first sample of each shard."""
        counts = self.split.table.samples_per_shard
        return np.cumsum(counts) - counts
