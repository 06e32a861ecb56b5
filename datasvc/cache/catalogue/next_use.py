"""Plans when one job with a known access order uses each shard, over several epochs. Pure.

The next use of each shard follows from this plan, and is the input of the eviction policy. Times are on the job's
clock: the bytes that its access order has served since epoch 0, computed as the number of positions times the mean
size of a sample. So the next uses of all jobs of a cache have the same unit, whatever the data and the speed of each
job. A lane is a span of the data set; an order reads its lanes in parallel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from datasvc.cache.catalogue.eviction import UNKNOWN
from datasvc.keyed_random import Integers
from datasvc.order import NEVER, AccessOrder, OrderConfig

# Added to the next uses of shards that a node does not own. It is larger than every time on a clock, so that these
# next uses are further than those of owned shards, and smaller than UNKNOWN, so that they stay known.
_NOT_OWNED: Final = UNKNOWN >> 1


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
) -> Uses:
    """Return the uses of each shard by an access order.

    Args:
        samples_per_shard: `int64[num_shards]`, see `AccessOrder`.
        bytes_per_shard: `int64[num_shards]`.
        config: parameters of the order.
        epochs: epochs to plan, ascending; at least one.
        chosen: `bool[num_shards]`, shards to plan; None: all.
        step_bytes: bytes by which each position advances the clock; None: the mean size of a sample.
    """
    step = step_bytes or bytes_per_position(samples_per_shard, bytes_per_shard)
    parts = []
    for epoch in epochs:
        columns = _uses_of_epoch(AccessOrder(samples_per_shard, config, epoch), step)
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


def _uses_of_epoch(order: AccessOrder, step: int) -> tuple[Integers, ...]:
    """Return the columns of `Uses`, in the order of its attributes."""
    windows = order.windows
    served_samples = order.epoch * order.num_samples
    return (
        windows.shards,
        np.full(len(windows.shards), order.epoch),
        # Position p belongs to lane p % lanes, and a use begins at a position of its own lane.
        windows.first % order.config.lanes,
        (served_samples + windows.first) * step,
        (served_samples + windows.stop) * step,
    )
