"""Cache space of an access order: shards in use at the same time, and the distance to fetch ahead. Pure.

Loaders and forecasts refuse an order that does not fit into the budget (`check_window`). Loaders derive a windowed
order that fits (`choose_windowed`). The stager and forecasts choose how far to fetch ahead (`choose_ahead_bytes`).
The expression -(-a // b) is a / b, rounded up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from datasvc.cache.catalogue.records import footprint
from datasvc.errors import CacheFullError
from datasvc.keyed_random import Integers
from datasvc.order import OrderConfig, Tail
from datasvc.printable import count_text
from datasvc.sizes import format_size

_MIN_SHARDS_AHEAD = 4  # enough for several requests in progress
_MAX_LANES: Final = 8  # can be divided evenly among 1, 2, 4 or 8 nodes
_MAX_SHARDS_PER_BLOCK: Final = 4
_AHEAD_DIVISOR: Final = 4  # a derived order leaves a quarter of the budget free for shards that are fetched ahead
_UNCACHED_DIVISOR: Final = 4  # without a budget, a derived order uses at most a quarter of the data at once


@dataclass(frozen=True)
class BatchesAtOnce:
    """Batches that the ranks of a job have in progress at the same time.

    Attributes:
        batch_size: samples per rank and step.
        num_ranks: number of data ranks.
        prefetch: batches that each rank prepares in advance.
        tail: treatment of the last samples of an epoch, see `plan_step`.
    """

    batch_size: int
    num_ranks: int = 1
    prefetch: int = 2
    tail: Tail = "drop"

    @property
    def global_batch(self) -> int:
        """Number of positions in one step, of all ranks together."""
        return self.batch_size * self.num_ranks

    @property
    def num_batches(self) -> int:
        """Number of global batches in progress at once."""
        # One in use, those prefetched, and one more because a rank may be a step ahead of the others on its node.
        return 1 + self.prefetch + (self.num_ranks > 1)

    @property
    def run(self) -> int:
        """Number of consecutive positions in progress at once."""
        return self.num_batches * self.global_batch

    @property
    def skipped(self) -> int:
        """Upper bound of the positions at the end of an epoch that fill no batch, or only batches of other ranks."""
        return {"drop": self.global_batch - 1, "short": self.num_ranks - 1, "pad": 0}[self.tail]

    def describe(self) -> str:
        """Return the parts of `run` in words."""
        per_rank = count_text(self.batch_size, "sample") + (
            f" x {count_text(self.num_ranks, 'rank')}" if self.num_ranks > 1 else ""
        )
        faster = ", 1 for a rank that is a step ahead" if self.num_ranks > 1 else ""
        return (
            f"{self.run} positions in progress: {count_text(self.num_batches, 'batch', 'batches')} (1 in use, "
            f"{self.prefetch} prefetched"
            f"{faster}) of {per_rank}"
        )


Need = Callable[[OrderConfig, BatchesAtOnce], int]
"""Returns the bytes of the cache that an order needs at once, such as `window_bytes` of a split."""


def window_bytes(
    samples_per_shard: Integers, bytes_per_shard: Integers, config: OrderConfig, run: int, *, skipped: int = 0
) -> int:
    """Return an upper bound of the bytes on disk of the shards that `run` consecutive positions use.

    The positions may be in two epochs: the last ones of an epoch, and the first ones of the next. The bound is exact
    without a shuffle. The shards of a windowed order depend on the epoch; its bound holds for all epochs.

    Args:
        samples_per_shard: `int64[num_shards]`.
        bytes_per_shard: `int64[num_shards]`, sizes of the files.
        config: parameters of the order.
        run: number of consecutive positions, see `BatchesAtOnce`.
        skipped: upper bound of the positions at the end of an epoch that are not served, see `BatchesAtOnce`.
    """
    has_samples = samples_per_shard > 0
    counts, sizes = samples_per_shard[has_samples], footprint(bytes_per_shard[has_samples])
    total = int(sizes.sum())
    if config.shuffle == "global" or run + skipped >= counts.sum():
        return total
    if config.shuffle is None:
        return min(total, _max_in_sequence(counts, sizes, run, skipped))
    lanes, block, num_samples = config.lanes, config.block or 1, int(counts.sum())
    lane_size = -(-num_samples // lanes)
    # Two neighbouring sticky lanes may share a shard, and its parts may be anywhere in them. So it may always be cut.
    num_shared = lanes - 1 if config.sticky else 0
    # Samples of one lane that are in use.
    span = min(blocks_at_once(config, run) * block, lane_size)
    # Each end of a span may cut a shard, which has at least one sample inside. So the shards that are completely
    # inside have at most `span - 2` samples together.
    in_one_epoch = _max_of_spans(counts, sizes, span - 2, lanes, 2 * lanes + num_shared)
    # At the end of an epoch, each lane has two spans: its last blocks, and its first blocks of the next epoch. If
    # lanes are not sticky, both ends of each span may cut a shard, except at the two ends of the data.
    num_cut = 2 * lanes + num_shared if config.sticky else 4 * lanes - 2
    # One is added because the positions of a lane are rounded up in each of the two epochs.
    run_of_lane = -(-(run + skipped) // lanes) + 1
    boundary_span = _max_boundary_samples(num_samples // lanes, lane_size, block, run_of_lane)
    at_boundary = _max_of_spans(counts, sizes, boundary_span - 2, lanes, num_cut)
    return min(total, max(in_one_epoch, at_boundary))


def blocks_at_once(config: OrderConfig, run: int) -> int:
    """Return the largest number of blocks of one lane that `run` consecutive positions may need."""
    per_lane = -(-run // config.lanes)
    return -(-(per_lane - 1) // (config.block or 1)) + 1


def _max_in_sequence(counts: Integers, sizes: Integers, run: int, skipped: int) -> int:
    """Return the largest sum of sizes of the shards of `run` positions in the order of the shard table."""
    stops = np.cumsum(counts)
    num_samples = int(stops[-1])
    # The largest sums begin with the last sample of a shard, at `stops - 1`. `last` has the last position of these
    # runs, numbered through two epochs. A run that crosses the end of the first epoch jumps over `skipped` positions.
    # `ends` has the numbers of the shards with these positions.
    last = stops + run - 2
    last += np.where(last >= num_samples - skipped, skipped, 0)
    ends = np.searchsorted(np.concatenate([stops, stops + num_samples]), last, side="right")
    bytes_before = np.concatenate([[0], np.cumsum(np.concatenate([sizes, sizes]))])  # by shard, of two epochs
    return int((bytes_before[np.minimum(ends + 1, 2 * len(sizes))] - bytes_before[np.arange(len(sizes))]).max())


def _max_boundary_samples(short: int, long: int, block: int, run: int) -> int:
    """Return the largest number of samples of a lane in the last blocks of an epoch and first ones of the next."""
    # Lanes have `short` or `long` samples. `run` counts the lane's positions in both epochs together, at least 2.
    best = 0
    for size in {short, long}:
        # Each possible division of the positions: `at_end` of them in the ending epoch, the others in the next one.
        at_end = np.arange(1, max(min(run - 1, size), 1) + 1)
        # All samples of the blocks in which these positions are.
        last_blocks = size - (size - at_end) // block * block
        first_blocks = np.minimum(-(-(run - at_end) // block) * block, size)
        best = max(best, int((last_blocks + first_blocks).max()))
    return best


def _max_of_spans(counts: Integers, sizes: Integers, span: int, lanes: int, num_cut: int) -> int:
    """Return an upper bound of the sum of sizes of the shards that overlap one span of samples in each lane."""
    # The shards completely inside the span of one lane have at most `span` samples. In all spans together, at most
    # `num_cut` shards are only partly inside. `counts` has the samples of each shard, at least 1.
    span = max(span, 0)
    by_count = np.argsort(counts, kind="stable")
    # At index i: the bytes of the i shards with the fewest samples, and the bytes of the i largest shards.
    ascending, short_bytes = counts[by_count], np.concatenate([[0], np.cumsum(sizes[by_count])])
    largest_bytes = np.concatenate([[0], np.cumsum(np.sort(sizes)[::-1])])
    # First bound: count the shards that fit inside if they have the fewest samples. Assume that so many shards, and
    # the cut ones, are those with the most bytes.
    num_inside = lanes * int(np.searchsorted(np.cumsum(ascending), span, side="right"))
    first_bound = int(largest_bytes[min(num_inside + num_cut, len(counts))])
    # Second bound, for a few small shards among large ones, such as the last shard of an ingest. For any shard i: all
    # shards with fewer samples than it, and as many of the largest shards as would fit if each had as many samples as
    # shard i. This is a bound for every i, so take the smallest.
    num_large = np.minimum(lanes * (span // ascending) + num_cut, len(counts))
    second_bound = int((short_bytes[:-1] + largest_bytes[num_large]).min())
    # Third bound, for long spans: assume that the samples inside are those with the most bytes each.
    by_density = np.argsort(-sizes / counts, kind="stable")
    dense_counts = np.concatenate([[0], np.cumsum(counts[by_density])])
    dense_bytes = np.interp(lanes * span, dense_counts, np.concatenate([[0], np.cumsum(sizes[by_density])]))
    third_bound = int(dense_bytes) + 1 + int(largest_bytes[min(num_cut, len(counts))])
    return min(first_bound, second_bound, third_bound)


def choose_windowed(
    samples_per_shard: Integers, batches: BatchesAtOnce, *, seed: int, need: Need, budget_bytes: int | None
) -> OrderConfig:
    """Return a windowed order for shards of these sizes, with as many lanes and as large blocks as fit the budget.

    A quarter of the budget stays free for shards that are fetched ahead. If no order fits the rest, the result may
    use all of the budget. If no order fits at all, the result is the smallest one. There are at most 8 lanes, and at
    most about 4 shards in a block.

    Args:
        samples_per_shard: `int64[num_shards]`, of all splits.
        batches: batches in progress.
        seed: seed of the order.
        need: returns the bytes that an order needs at once.
        budget_bytes: bytes available in the cache; None: there is no cache, so use at most a quarter of the data.
    """
    num_shards, num_samples = int((samples_per_shard > 0).sum()), int(samples_per_shard.sum())
    mean_samples = max(1, num_samples // max(1, num_shards))
    # Blocks of whole shards, of parts of a shard, and (below) of one sample.
    block_sizes = [mean_samples * shards for shards in (_MAX_SHARDS_PER_BLOCK, 2, 1)]
    block_sizes += [max(1, mean_samples // part) for part in (2, 4, 16)]
    candidates = [
        OrderConfig(seed, "windowed", lanes, block)
        for lanes in (_MAX_LANES, 4, 2, 1)
        for block in dict.fromkeys([*block_sizes, 1])
        if lanes <= max(num_shards, 1)
    ]
    # The order that shuffles most comes first: the one with most samples in one block of each lane, then most lanes.
    candidates.sort(key=lambda order: (order.lanes * (order.block or 1), order.lanes), reverse=True)
    all_shards_bytes = need(OrderConfig(seed), batches)
    if budget_bytes is None:
        limits = [all_shards_bytes // _UNCACHED_DIVISOR]
    elif all_shards_bytes <= budget_bytes:
        limits = [budget_bytes]  # no space is left free, because the shards to fetch ahead fit too
    else:
        limits = [budget_bytes - budget_bytes // _AHEAD_DIVISOR, budget_bytes]
    for limit in limits:
        for order in candidates:
            if need(order, batches) <= limit:
                return order
    return candidates[-1]


def choose_ahead_bytes(bytes_per_shard: Integers, budget_bytes: int) -> int:
    """Return the distance ahead of a job's clock, in bytes, up to which fetching a shard may evict other shards.

    An evicted shard may be one that is kept for the next epoch, so the distance is only 1/32 of the budget. If the
    shards are large, it is four times the largest one, to keep enough requests in progress, but at most 1/16 of the
    budget. It is never less than the largest shard.
    """
    largest = int(bytes_per_shard.max(initial=0))
    # The clock counts bytes of shards, the budget counts disk blocks: convert the budget.
    budget_on_clock = budget_bytes * int(bytes_per_shard.sum()) // max(1, int(footprint(bytes_per_shard).sum()))
    return max(largest, min(max(_MIN_SHARDS_AHEAD * largest, budget_on_clock // 32), budget_on_clock // 16))


def check_window(
    order: OrderConfig, batches: BatchesAtOnce, need: Need, budget_bytes: int, samples_per_shard: Integers, what: str
) -> None:
    """Raise CacheFullError if the shards in use at the same time do not fit: the run would fail later.

    The message describes what needs the space, and names the largest lanes, block and batch that fit.

    Args:
        order: parameters of the access order.
        batches: batches in progress.
        need: returns the bytes that an order needs at once.
        budget_bytes: bytes available.
        samples_per_shard: `int64[num_shards]`, of all splits.
        what: name of the access order, for the message.
    """
    needed = need(order, batches)
    if needed <= budget_bytes:
        return
    raise CacheFullError(
        f"{what} needs {needed} bytes of the cache at once, and {budget_bytes} are available beside pinned objects "
        f"({format_size(needed)} of {format_size(budget_bytes)}). It needs {_describe(order, batches)}. Raise the "
        f"budget to {-(-needed // 10**6)}MB; or {_advise(order, batches, need, budget_bytes, samples_per_shard)}"
    )


def _describe(order: OrderConfig, batches: BatchesAtOnce) -> str:
    """Return the parts of a window in words."""
    if order.shuffle == "global":
        return "all shards, because shuffle='global' permutes all samples of an epoch"
    boundary = "at the end of an epoch also those of the first positions of the next"
    if order.shuffle is None:
        return f"the shards of {batches.describe()}; {boundary}"
    num_blocks = blocks_at_once(order, batches.run)
    return (
        f"the shards of {order.lanes} lane{'s' * (order.lanes > 1)} x {num_blocks} block{'s' * (num_blocks > 1)} of "
        f"{count_text(order.block or 1, 'sample')}, which hold {batches.describe()}; a shard that a block or "
        "lane cuts counts in full; "
        f"{boundary}"
    )


def _advise(
    order: OrderConfig, batches: BatchesAtOnce, need: Need, budget_bytes: int, samples_per_shard: Integers
) -> str:
    """Return advice for an order that does not fit: the largest lanes, block and batch, or another order."""

    def fits(order: OrderConfig, batches: BatchesAtOnce = batches) -> bool:
        return need(order, batches) <= budget_bytes

    fitting: dict[str, tuple[int, int]] = {}  # name -> value, and the bytes that the order then needs
    if order.shuffle == "windowed":
        lanes = _largest_fitting(lambda value: fits(replace(order, lanes=value)), order.lanes - 1)
        block = _largest_fitting(lambda value: fits(replace(order, block=value)), (order.block or 1) - 1)
        if lanes:
            fitting["lanes"] = lanes, need(replace(order, lanes=lanes), batches)
        if block:
            fitting["block"] = block, need(replace(order, block=block), batches)
    batch_size = _largest_fitting(
        lambda value: fits(order, replace(batches, batch_size=value)), batches.batch_size - 1
    )
    if batch_size:
        fitting["batch_size"] = batch_size, need(order, replace(batches, batch_size=batch_size))
    if fitting:
        parts = [f"{name}={value} ({format_size(size)})" for name, (value, size) in fitting.items()]
        return f"give one of the largest values that fit, with all others unchanged: {', '.join(parts)}"
    windowed = choose_windowed(samples_per_shard, batches, seed=order.seed, need=need, budget_bytes=budget_bytes)
    size = need(windowed, batches)
    if size <= budget_bytes:
        return f"use shuffle='windowed', lanes={windowed.lanes}, block={windowed.block} ({format_size(size)})"
    return (
        f"ingest smaller shards, or give smaller batches: even one lane in blocks of one sample needs "
        f"{format_size(size)}"
    )


def _largest_fitting(fits: Callable[[int], bool], maximum: int) -> int:
    """Return the largest value from 1 to `maximum` that fits, by bisection; 0 if none does."""
    low, high = 0, maximum
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
