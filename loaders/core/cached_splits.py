"""Shard stores that read a loader's splits through the node's cache. Loaders with `cache=` use them.

A window is the set of shards that consecutive positions of an order need at the same time. The cache's budget must
hold the windows of all splits. Otherwise creating the loader fails, before anything is fetched.
"""

from __future__ import annotations

from pathlib import Path

from datasvc.cache import Cache
from datasvc.cache.cache import use_cache
from datasvc.cache.catalogue.records import footprint
from datasvc.cache.prefetch.prefetching_store import PrefetchingShardStore
from datasvc.cache.prefetch.window_budget import check_window, window_bytes
from datasvc.loaders.core.data_ranks import DataRanks
from datasvc.loaders.core.mixture import Mixture, clock_steps, most_of, split_orders, splits_of
from datasvc.order import OrderConfig, lanes_of_rank
from datasvc.shards import Split


def follow_splits(
    samples: Split | Mixture,
    order: OrderConfig,
    cache: Cache | str | Path,
    ranks: DataRanks,
    *,
    global_batch: int,
    prefetch: int,
) -> list[PrefetchingShardStore]:
    """Return a prefetching shard store for each split, for one rank of a loader.

    For the arguments see `Loader`; `global_batch` is the number of samples of a step over all ranks. A cache that is
    given by its folder is opened here and closed again; the stores keep jobs of their own on it.

    Raises:
        CacheFullError: the cache's budget cannot hold the windows that the order needs; the message has both sizes.
        ConfigError, CorruptDataError, UnavailableError: the cache cannot be opened, see `Cache`.
    """
    with use_cache(cache) as opened:
        _check_windows(samples, order, opened, global_batch * (prefetch + 1))
        # Consecutive positions of a mixture have no fixed relation to its splits' lanes: every rank reads all lanes.
        lanes = (
            None
            if isinstance(samples, Mixture)
            else lanes_of_rank(global_batch, rank=ranks.rank, world_size=ranks.world_size, lanes=order.lanes)
        )
        return [
            PrefetchingShardStore(
                opened, split, split_order, lanes, num_ranks=ranks.world_size, step_bytes=step_bytes
            )
            for split, split_order, step_bytes in zip(
                splits_of(samples), split_orders(samples, order), clock_steps(samples), strict=True
            )
        ]


def _check_windows(samples: Split | Mixture, order: OrderConfig, cache: Cache, run: int) -> None:
    """Raise CacheFullError unless the cache can hold the shards of any `run` consecutive positions."""
    tables = [split.table for split in splits_of(samples)]
    needed = 0
    for table, split_run in zip(tables, most_of(samples, run), strict=True):
        window = window_bytes(table.samples_per_shard, table.bytes_per_shard, order, split_run)
        # At the boundary of two epochs the last shards of one and the first of the next are needed together.
        needed += min(2 * window, int(footprint(table.bytes_per_shard).sum())) if split_run else 0
    available = cache.available_bytes({info.digest for table in tables for info in table.shards()})
    check_window(needed, available, f"the order of {samples!r}")
