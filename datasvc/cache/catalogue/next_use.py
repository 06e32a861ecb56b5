"""When a job needs each shard, over many epochs: what a cache may know of the future. Pure.

Times are on the job's clock: the bytes that its order served since epoch 0, which is the number of positions times
the mean size of a sample. So jobs of one cache can be compared, whatever their data and their speed.
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

# Beyond every clock, and below UNKNOWN.
_NOT_OWNED: Final = UNKNOWN >> 1


@dataclass(frozen=True)
class Uses:
    """Uses of shards by one job on one node, in the order in which they begin.

    A shard is used in one piece an epoch, but for those at the border of two lanes: these are used once per lane.

    Attributes:
        shards: `int64[n]`.
        epochs: `int64[n]`.
        lanes: `int64[n]`, the lane of the order that needs the piece.
        first: `int64[n]`, when the piece is needed first, ascending. Bytes.
        stop: `int64[n]`, from when on it is not needed any more. Bytes.
    """

    shards: Integers
    epochs: Integers
    lanes: Integers
    first: Integers
    stop: Integers

    def __len__(self) -> int:
        return len(self.shards)

    def only(self, chosen: Integers | npt.NDArray[np.bool_]) -> Uses:
        """Return some of the uses: numbers, ascending, or a mask."""
        return Uses(
            self.shards[chosen], self.epochs[chosen], self.lanes[chosen], self.first[chosen], self.stop[chosen]
        )


def bytes_per_position(samples_per_shard: Integers, bytes_per_shard: Integers) -> int:
    """Return by how much the clock goes on with each position: the mean size of a sample, at least 1."""
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
    """Return when the order needs each shard.

    Args:
        samples_per_shard: as for `AccessOrder`.
        bytes_per_shard: `int64[num_shards]`.
        config: the order's parameters.
        epochs: which epochs, ascending.
        chosen: `bool[num_shards]`, which shards; None: all.
        step_bytes: by how much the clock goes on with each position; None: the mean size of a sample.
    """
    step = step_bytes or bytes_per_position(samples_per_shard, bytes_per_shard)
    parts = []
    for epoch in epochs:
        columns = _uses_of_epoch(AccessOrder(samples_per_shard, config, epoch), step)
        wanted = slice(None) if chosen is None else chosen[columns[0]]
        parts.append([column[wanted] for column in columns])
    return Uses(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def next_uses(uses: Uses, *, epochs_ahead: int | None = 1) -> Integers:
    """Return when the shard of each use is needed again once that use has stopped.

    Args:
        uses: of one job on one node.
        epochs_ahead: how many epochs after its own a use sees; None: all there are.

    Returns:
        `int64[n]`, NEVER where no later use is seen.
    """
    # Ranks instead of times, so that shard and time fit into one integer.
    times = np.unique(np.concatenate([uses.first, uses.stop]))
    base = uses.shards * (len(times) + 1)
    begins, ends = (base + np.searchsorted(times, column) for column in (uses.first, uses.stop))
    by_shard = np.argsort(begins, kind="stable")
    found = np.searchsorted(begins[by_shard], ends)
    following = by_shard[np.minimum(found, len(uses) - 1)]
    is_seen = (found < len(uses)) & (uses.shards[following] == uses.shards)
    if epochs_ahead is not None:
        is_seen &= uses.epochs[following] - uses.epochs <= epochs_ahead
    return np.where(is_seen, uses.first[following], NEVER)


def bias_owned(again: Integers, owned: npt.NDArray[np.bool_]) -> Integers:
    """Return next uses such that a node among peers evicts what it owns after what it does not.

    The owner alone reads a shard from the origin; everybody else gets it from there. Where all nodes need all shards,
    each would keep the same ones by next use alone, and what none keeps would come from the origin in every epoch.

    Args:
        again: `int64[n]`, next uses by this node, NEVER where none is seen.
        owned: `bool[n]`, whether this node is the owner of the shard.

    Returns:
        `int64[n]`: first what is owned, by next use; then what is not; then, as UNKNOWN, what is owned and which only
        peers may ask for; last, as NEVER, what nobody will miss here.
    """
    by_peers = np.where(owned, UNKNOWN, NEVER)
    by_this_node = np.where(owned, again, again + _NOT_OWNED)
    return np.where(again < UNKNOWN, by_this_node, by_peers)


def _uses_of_epoch(order: AccessOrder, step: int) -> tuple[Integers, ...]:
    windows = order.windows
    before = order.epoch * order.num_samples
    return (
        windows.shards,
        np.full(len(windows.shards), order.epoch),
        # Position p belongs to lane p % lanes, and a piece is needed first at a position of its own lane.
        windows.first % order.config.lanes,
        (before + windows.first) * step,
        (before + windows.stop) * step,
    )
