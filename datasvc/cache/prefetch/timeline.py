"""Timeline of one job: when its access order uses each shard, on the job's clock.

The stager plans its fetches with a timeline, and `PrefetchingShardStore` finds the next use of a released shard. The
clock counts the bytes that the order has served since epoch 0, see `next_use`. A timeline covers the present epoch
and the next one. This is enough to find each shard's next use, because every shard is used in each epoch.
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
    """One use of a shard by a job.

    Attributes:
        shard: number in the shard table.
        first: time of the first read, on the job's clock. Bytes.
        stop: time after the last read. Bytes.
    """

    shard: int
    first: int
    stop: int


class UseTimeline:
    """The uses of one job's shards, epoch by epoch.

    Args:
        table: shards of the split.
        config: parameters of the access order.
        lanes: lanes that this process reads; None: all.
        step_bytes: bytes by which each position advances the clock; None: the mean size of a sample. In a mixture,
            it must include the bytes that the job reads of other splits between two positions of this split.
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
        self._step_bytes = step_bytes or bytes_per_position(self._samples, self._bytes)
        self._epochs: dict[int, tuple[Uses, Uses]] = {}

    def clock(self, epoch: int, position: int) -> int:
        """Return the job's clock at a position. Bytes."""
        return (epoch * self._num_samples + position) * self._step_bytes

    def reuse(self, shard: int, epoch: int, position: int) -> NextUse:
        """Return when a rank of this node next uses a shard that this process releases at a position.

        It is NEVER if there is no use until the end of the next epoch. The uses by all lanes count.
        """
        now = self.clock(epoch, position)
        # A released shard is not in use, so only uses that begin from now on count.
        return NextUse(now, _first_use(shard, ((uses, uses.first >= now) for uses, _ in self._uses_of(epoch))))

    def next_use(self, shard: int, epoch: int, position: int) -> int:
        """Return the next use of a shard by this process, until the end of the next epoch; NEVER if there is none."""
        now = self.clock(epoch, position)
        # A use that has begun and has not ended counts too.
        return _first_use(shard, ((local, local.stop > now) for _, local in self._uses_of(epoch)))

    def next_uses(self, epoch: int, position: int) -> dict[int, int]:
        """Return when this process needs each shard next, by shard number, until the end of the next epoch."""
        uses: dict[int, int] = {}
        for needed in self.needed_shards(epoch, position):
            uses.setdefault(needed.shard, needed.first)
        return uses

    def needed_shards(self, epoch: int, position: int) -> list[NeededShard]:
        """Return the uses by this process that end after a position, to the end of the next epoch; earliest first."""
        now = self.clock(epoch, position)
        return [
            NeededShard(shard, first, stop)
            for _, local in self._uses_of(epoch)
            for shard, first, stop in zip(
                local.shards.tolist(), local.first.tolist(), local.stop.tolist(), strict=True
            )
            if stop > now
        ]

    def _uses_of(self, epoch: int) -> Iterator[tuple[Uses, Uses]]:
        """Yield a pair for an epoch and for the next one: the uses by all lanes, and by the lanes of this process."""
        for number in (epoch, epoch + 1):
            pair = self._epochs.get(number)
            if pair is None:
                uses = plan_uses(self._samples, self._bytes, self._config, [number], step_bytes=self._step_bytes)
                pair = uses, uses if self._lanes is None else uses.only(np.isin(uses.lanes, self._lanes))
                # The dictionary is replaced, not changed, because other threads may be reading it.
                neighbours = {other: entry for other, entry in self._epochs.items() if abs(other - number) <= 1}
                self._epochs = neighbours | {number: pair}
            yield pair


def _first_use(shard: int, epochs: Iterable[tuple[Uses, npt.NDArray[np.bool_]]]) -> int:
    """Return the first use of a shard among the uses that each mask selects; NEVER if there is none."""
    for uses, is_selected in epochs:
        times = uses.first[is_selected & (uses.shards == shard)]
        if len(times):
            return int(times[0])  # epochs, and the uses of an epoch, are ascending
    return NEVER
