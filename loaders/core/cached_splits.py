"""Shard stores that read a loader's splits through the node's cache. Loaders with `cache=` use them.

A window is the set of shards that consecutive positions of an order need at the same time. The cache's budget must
hold the windows of all splits. Otherwise creating the loader fails, before anything is fetched.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from datasvc.cache import Cache
from datasvc.cache.cache import use_cache
from datasvc.cache.prefetch.prefetching_store import PrefetchingShardStore
from datasvc.cache.prefetch.window_budget import (
    BatchesAtOnce,
    Need,
    check_window,
    window_bytes,
)
from datasvc.keyed_random import Integers
from datasvc.loaders.core.mixture import Mixture, clock_steps, most_of, split_orders, splits_of
from datasvc.loaders.ranks.data_ranks import DataRanks
from datasvc.order import OrderConfig, lanes_of_rank
from datasvc.shards import Split


def follow_splits(
    samples: Split | Mixture,
    order: OrderConfig,
    cache: Cache | str | Path,
    ranks: DataRanks,
    *,
    batches: BatchesAtOnce,
) -> list[PrefetchingShardStore]:
    """Return a prefetching shard store for each split, for one rank of a loader.

    For the arguments see `Loader`; `batches` are those in progress on all ranks. If `cache` is a folder, the cache is
    open only during this call. Each store opens a cache job of its own.

    Raises:
        CacheFullError: the cache's budget cannot hold the windows that the order needs; the message has both sizes,
            their parts, and values that fit.
        ConfigError, CorruptDataError, UnavailableError: the cache cannot be opened, see `Cache`.
    """
    with use_cache(cache) as opened:
        available_bytes = find_available_bytes(samples, opened)
        need = window_need(samples)
        check_window(order, batches, need, available_bytes, samples_per_shard(samples), f"the order of {samples!r}")
        # Consecutive positions of a mixture have no fixed relation to its splits' lanes: every rank reads all lanes.
        lanes = (
            None
            if isinstance(samples, Mixture)
            else lanes_of_rank(batches.global_batch, rank=ranks.rank, world_size=ranks.world_size, lanes=order.lanes)
        )
        return [
            PrefetchingShardStore(
                opened, split, split_order, lanes, num_ranks=ranks.world_size, step_bytes=step_bytes
            )
            for split, split_order, step_bytes in zip(
                splits_of(samples), split_orders(samples, order), clock_steps(samples), strict=True
            )
        ]


def window_need(samples: Split | Mixture) -> Need:
    """Return the function `need(order, batches)`: bytes of all shards that batches in progress need at once."""
    tables = [split.table for split in splits_of(samples)]

    def need(order: OrderConfig, batches: BatchesAtOnce) -> int:
        is_mixture = isinstance(samples, Mixture)
        # Padding repeats samples from the start of the epoch, so their shards are needed too. In two cases they are
        # counted already: a split without a shuffle begins its next epoch with them, and a global shuffle needs all.
        padding = batches.global_batch if batches.tail == "pad" and (is_mixture or order.shuffle == "windowed") else 0
        run_positions, skipped = batches.run, batches.skipped  # the run: the positions of the batches in progress
        if is_mixture:
            # `skipped` counts positions at the end of a split's epoch. A mixture skips positions anywhere in the
            # epochs of its splits, so count them as a part of the run.
            run_positions, skipped = run_positions + skipped, 0
        runs = most_of(samples, run_positions)  # the largest number of samples that a split has in the run
        needed_bytes = 0
        for table, run, padding_run in zip(tables, runs, most_of(samples, padding), strict=True):
            counts, sizes = table.samples_per_shard, table.bytes_per_shard
            if run:
                window = window_bytes(counts, sizes, order, run, skipped=skipped)
                padded = window_bytes(counts, sizes, order, padding_run) if padding_run else 0
                all_bytes = window_bytes(counts, sizes, OrderConfig(), run)  # all shards: for a global shuffle
                needed_bytes += min(window + padded, all_bytes)
        return needed_bytes

    return need


def find_available_bytes(samples: Split | Mixture, cache: Cache) -> int:
    """Return the bytes that a cache has for `samples`: its budget without the pinned bytes of other objects."""
    return cache.available_bytes({info.digest for split in splits_of(samples) for info in split.table.shards()})


def samples_per_shard(samples: Split | Mixture) -> Integers:
    """Return the number of samples in each shard of all splits: `int64[num_shards]`."""
    return np.concatenate([split.table.samples_per_shard for split in splits_of(samples)])
