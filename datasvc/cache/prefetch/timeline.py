"""What one job needs when: its order on the clock that jobs of a cache are compared by. Pure.

The clock counts bytes that the order served since epoch 0, see `uses`. A job looks ahead to the end of the next
epoch: further it need not see, as every shard is used once in each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from datasvc.cache.catalogue.next_use import Uses, bytes_per_position, plan_uses
from datasvc.order import NEVER, NextUse, OrderConfig
from datasvc.shards.format.shard_table import ShardTable


@dataclass(frozen=True)
class NeededShard:
    """A shard that is needed, or a part of it.

    Attributes:
        shard: number in the shard table.
        first: when it is needed first, on the job's clock.
        stop: from when on it is not needed any more.
    """

    shard: int
    first: int
    stop: int


class UseTimeline:
    """The uses of one job's shards, epoch by epoch.

    Args:
        table: the shards.
        config: the order's parameters.
        lanes: those that this process is served from; None: all.
        step_bytes: by how much the clock goes on with each position. None: the mean size of a sample; what is read in
            turns with other data goes on by what the job reads of all of it from one position to the next.
    """

    def __init__(
        self,
        table: ShardTable,
        config: OrderConfig,
        lanes: Sequence[int] | None = None,
        *,
        step_bytes: int | None = None,
    ) -> None:
        self._samples, self._bytes = table.samples_per_shard, table.bytes_per_shard
        self._config = config
        self._lanes = None if lanes is None else np.asarray(lanes)
        self._num_samples = int(self._samples.sum())
        self._step = step_bytes or bytes_per_position(self._samples, self._bytes)
        self._epochs: dict[int, tuple[Uses, Uses]] = {}

    def clock(self, epoch: int, position: int) -> int:
        """Return what the job's clock says at a position."""
        return (epoch * self._num_samples + position) * self._step

    def reuse(self, shard: int, epoch: int, position: int) -> NextUse:
        """Return when a shard that is let go of at a position is needed again, by the end of the next epoch.

        Whichever lane needs it then: that may be another rank's of this node.
        """
        now = self.clock(epoch, position)
        return NextUse(now, _first_use(shard, ((uses, uses.first >= now) for uses, _ in self._both(epoch))))

    def next_use(self, shard: int, epoch: int, position: int) -> int:
        """Return when this process needs a shard from a position on; NEVER where it does not see that."""
        now = self.clock(epoch, position)
        return _first_use(shard, ((own, own.stop > now) for _, own in self._both(epoch)))

    def next_uses(self, epoch: int, position: int) -> dict[int, int]:
        """Return when this process needs each shard from a position on, by number; none that it sees no use of."""
        uses: dict[int, int] = {}
        for piece in self.pieces(epoch, position):
            uses.setdefault(piece.shard, piece.first)
        return uses

    def pieces(self, epoch: int, position: int) -> list[NeededShard]:
        """Return what is needed from a position on until the end of the next epoch, in order of need."""
        now = self.clock(epoch, position)
        return [
            NeededShard(shard, first, stop)
            for _, own in self._both(epoch)
            for shard, first, stop in zip(own.shards.tolist(), own.first.tolist(), own.stop.tolist(), strict=True)
            if stop > now
        ]

    def _both(self, epoch: int) -> Iterator[tuple[Uses, Uses]]:
        """Yield the uses of an epoch, and then of the next: by all lanes, and by this process's own."""
        for each in (epoch, epoch + 1):
            found = self._epochs.get(each)
            if found is None:
                uses = plan_uses(self._samples, self._bytes, self._config, [each], step_bytes=self._step)
                found = uses, uses if self._lanes is None else uses.only(np.isin(uses.lanes, self._lanes))
                near = {known: kept for known, kept in self._epochs.items() if abs(known - each) <= 1}
                self._epochs = near | {each: found}
            yield found


def _first_use(shard: int, epochs: Iterable[tuple[Uses, npt.NDArray[np.bool_]]]) -> int:
    """Return when a shard is used first, of those uses that count; NEVER where none does."""
    for uses, counts in epochs:
        found = uses.first[counts & (uses.shards == shard)]
        if len(found):
            return int(found[0])
    return NEVER
