"""When the access order of one job uses each shard, on the job's clock; the eviction policy needs the next uses.

The clock counts the bytes that the order has served since epoch 0: the number of positions times the mean size of a
sample. So the next uses of all jobs of a cache have the same unit. A lane is a span of the data set; an order reads
its lanes in parallel. `plan_uses` plans any epochs. A `UseTimeline` has the present epoch and the next one, which is
enough to find each shard's next use, because every shard is used in each epoch, unless its weights are very small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from datasvc.cache.catalogue.eviction import UNKNOWN
from datasvc.keyed_random import Integers
from datasvc.order import NEVER, AccessOrder, NextUse, OrderConfig
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.packing.groups import widened

# Added to the next uses of shards that a node does not own. It is larger than every time on a clock, so that these
# next uses are further than those of owned shards, and smaller than UNKNOWN, so that they stay known.
_NOT_OWNED: Final = UNKNOWN >> 1


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
        self._table, self._bytes = table, table.bytes_per_shard
        samples = table.positions_per_shard
        self._config = config
        self._lanes = None if lanes is None else np.asarray(lanes)
        self._num_samples = int(samples.sum())
        self._step_bytes = step_bytes or bytes_per_position(samples, self._bytes)
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
                counts = self._table.epoch_counts(self._config, number)
                step, grouping = self._step_bytes, self._table.grouping
                span = None if grouping is None else grouping.span
                uses = plan_uses(counts, self._bytes, self._config, [number], step_bytes=step, span=span)
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


@dataclass(frozen=True)
class Uses:
    """Uses of shards by one job on one node, in the order in which they begin.

    Each shard is used once per epoch; a shard at the border of two lanes is used once per lane.

    Attributes:
        shards: `int64[n]`, number of the shard.
        epochs: `int64[n]`, epoch of the use.
        lanes: `int64[n]`, lane of the access order that reads the shard.
        first: `int64[n]`, time of the first read, ascending. Bytes.
        stop: `int64[n]`, time after the last read. Bytes.
    """

    shards: Integers
    epochs: Integers
    lanes: Integers
    first: Integers
    stop: Integers

    def __len__(self) -> int:
        return len(self.shards)

    def only(self, chosen: Integers | npt.NDArray[np.bool_]) -> Uses:
        """Return the chosen uses; `chosen` is their ascending indices, or a mask."""
        return Uses(
            self.shards[chosen], self.epochs[chosen], self.lanes[chosen], self.first[chosen], self.stop[chosen]
        )


def bytes_per_position(samples_per_shard: Integers, bytes_per_shard: Integers) -> int:
    """Return the bytes by which each position advances the clock: the mean size of a sample, at least 1."""
    return max(1, int(bytes_per_shard.sum()) // max(1, int(samples_per_shard.sum())))


def plan_uses(
    samples_per_shard: Integers,
    bytes_per_shard: Integers,
    config: OrderConfig,
    epochs: Iterable[int],
    *,
    chosen: npt.NDArray[np.bool_] | None = None,
    step_bytes: int | None = None,
    span: int | None = None,
) -> Uses:
    """Return the uses of each shard by an access order.

    Args:
        samples_per_shard: `int64[num_shards]`, see `AccessOrder`.
        bytes_per_shard: `int64[num_shards]`.
        config: parameters of the order.
        epochs: epochs to plan, ascending; at least one.
        chosen: `bool[num_shards]`, shards to plan; None: all.
        step_bytes: bytes by which each position advances the clock; None: the mean size of a sample.
        span: of the groups of the table, see `Grouping`; None: it has none.
    """
    step = step_bytes or bytes_per_position(samples_per_shard, bytes_per_shard)
    parts = []
    for epoch in epochs:
        columns = _uses_of_epoch(AccessOrder(samples_per_shard, config, epoch), step, span)
        if chosen is not None:
            shards = columns[0]
            columns = tuple(column[chosen[shards]] for column in columns)
        parts.append(columns)
    return Uses(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def next_uses(uses: Uses) -> Integers:
    """Return, for each use by one job on one node, when its shard is needed again after that use.

    Returns:
        `int64[n]`, next use in bytes; NEVER if there is none until the end of the next epoch.
    """
    # Shard and time are joined into one integer that sorts by shard, then by time. Each time is replaced by its index
    # among the sorted times, so that both fit.
    times = np.unique(np.concatenate([uses.first, uses.stop]))
    base = uses.shards * (len(times) + 1)
    begins, ends = (base + np.searchsorted(times, column) for column in (uses.first, uses.stop))
    # `following` is, for each use, the first use in the order `by_shard` that begins at or after its end. If the
    # shard is not used again, this is a use of another shard, or the last use.
    by_shard = np.argsort(begins, kind="stable")
    insert_at = np.searchsorted(begins[by_shard], ends)
    following = by_shard[np.minimum(insert_at, len(uses) - 1)]
    is_reused = (insert_at < len(uses)) & (uses.shards[following] == uses.shards)
    # A job of the real cache also declares next uses only until the end of the next epoch, see `UseTimeline`.
    is_reused &= uses.epochs[following] - uses.epochs <= 1
    return np.where(is_reused, uses.first[following], NEVER)


def bias_owned(times: Integers, owned: npt.NDArray[np.bool_]) -> Integers:
    """Change next uses so that a node with peers evicts shards that it does not own before those that it owns.

    Only the owner reads a shard from the origin; the other nodes read it from the owner. If all nodes need all
    shards, next uses alone would make all nodes keep the same shards. The other shards would then be read from the
    origin in every epoch.

    Args:
        times: `int64[n]`, next uses by this node; NEVER if there is none.
        owned: `bool[n]`, whether this node is the owner of the shard.

    Returns:
        `int64[n]`. From the smallest values to the largest: owned shards that this node needs, by next use; other
        shards that it needs, by next use; UNKNOWN for owned shards that only peers may request; NEVER for shards that
        no node will request from this node.
    """
    if_needed = np.where(owned, times, times + _NOT_OWNED)
    if_not_needed = np.where(owned, UNKNOWN, NEVER)
    return np.where(times < UNKNOWN, if_needed, if_not_needed)


def _uses_of_epoch(order: AccessOrder, step: int, span: int | None) -> tuple[Integers, ...]:
    """Return the columns of `Uses`, in the order of its attributes."""
    windows = order.windows if span is None else widened(order.windows, span, order.num_samples)
    served_samples = order.epoch * order.num_samples
    return (
        windows.shards,
        np.full(len(windows.shards), order.epoch),
        # Position p belongs to lane p % lanes, and a use begins at a position of its own lane.
        windows.first % order.config.lanes,
        (served_samples + windows.first) * step,
        (served_samples + windows.stop) * step,
    )
