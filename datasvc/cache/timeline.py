"""What one job needs when: its order on the clock that jobs of a cache are compared by. Pure.

The clock counts bytes that the order served since epoch 0, see `uses`. A job looks ahead to the end of the next
epoch: further it need not see, as every shard is used once in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from datasvc.cache.uses import Uses, bytes_per_position, plan_uses
from datasvc.keyed import Integers
from datasvc.order import NEVER, OrderConfig, Reuse
from datasvc.shards.table import ShardTable


@dataclass(frozen=True)
class Piece:
    """A shard that is needed, or a part of it.

    Attributes:
        shard: number in the shard table.
        first: when it is needed first, on the job's clock.
        stop: from when on it is not needed any more.
    """

    shard: int
    first: int
    stop: int


class Timeline:
    """The uses of one job's shards, epoch by epoch.

    Args:
        table: the shards.
        config: the order's parameters.
        lanes: those that this process is served from, and whose pieces it fetches; None: all. Next uses are those of
            all lanes: other ranks of the node use the same shards.
    """

    def __init__(self, table: ShardTable, config: OrderConfig, lanes: Sequence[int] | None = None) -> None:
        self._samples, self._bytes = table.samples_per_shard, table.bytes_per_shard
        self._config = config
        self._lanes = None if lanes is None else np.asarray(lanes)
        self._num_samples = int(self._samples.sum())
        self._step = bytes_per_position(self._samples, self._bytes)
        self._epochs: dict[int, tuple[Uses, Integers]] = {}

    def clock(self, epoch: int, position: int) -> int:
        """Return what the job's clock says at a position."""
        return (epoch * self._num_samples + position) * self._step

    def reuse(self, shard: int, epoch: int, position: int) -> Reuse:
        """Return when a shard that is let go of at a position is needed again, by the end of the next epoch."""
        now = self.clock(epoch, position)
        uses, _ = self._epoch(epoch)
        later = uses.first[(uses.shards == shard) & (uses.first >= now)]
        next_use = int(later[0]) if len(later) else int(self._epoch(epoch + 1)[1][shard])
        return Reuse(now, next_use)

    def next_use(self, shard: int, epoch: int, position: int) -> int:
        """Return when a shard is needed from a position on, by whatever lane; one entry of `next_uses`."""
        uses, _ = self._epoch(epoch)
        ahead = uses.first[(uses.shards == shard) & (uses.stop > self.clock(epoch, position))]
        return int(ahead[0]) if len(ahead) else int(self._epoch(epoch + 1)[1][shard])

    def next_uses(self, epoch: int, position: int) -> Integers:
        """Return when each shard is needed from a position on: `int64[num_shards]`, NEVER where none is seen."""
        now = self.clock(epoch, position)
        uses, _ = self._epoch(epoch)
        ahead = uses.only(uses.stop > now)
        next_uses = self._epoch(epoch + 1)[1].copy()
        np.minimum.at(next_uses, ahead.shards, ahead.first)
        return next_uses

    def pieces(self, epoch: int, position: int) -> list[Piece]:
        """Return what is needed from a position on until the end of the next epoch, in order of need."""
        now = self.clock(epoch, position)
        both = [self._epoch(each)[0] for each in (epoch, epoch + 1)]
        return [
            Piece(shard, first, stop)
            for uses in map(self._own, both)
            for shard, first, stop in zip(uses.shards.tolist(), uses.first.tolist(), uses.stop.tolist(), strict=True)
            if stop > now
        ]

    def _own(self, uses: Uses) -> Uses:
        return uses if self._lanes is None else uses.only(np.isin(uses.lanes, self._lanes))

    def _epoch(self, epoch: int) -> tuple[Uses, Integers]:
        """Return the uses of an epoch, and the first of each shard."""
        if epoch not in self._epochs:
            uses = plan_uses(self._samples, self._bytes, self._config, [epoch])
            first = np.full(len(self._samples), NEVER, np.int64)
            np.minimum.at(first, uses.shards, uses.first)
            self._epochs = {each: known for each, known in self._epochs.items() if abs(each - epoch) <= 1}
            self._epochs[epoch] = uses, first
        return self._epochs[epoch]
