"""What a loader reads through a node's cache: the shards of each of its splits, whose windows must fit together."""

from __future__ import annotations

from datasvc.cache import Cache
from datasvc.cache.catalogue.records import footprint
from datasvc.cache.prefetch.prefetching_store import PrefetchingShardStore
from datasvc.cache.prefetch.window_budget import check_window, window_bytes
from datasvc.loaders.core.data_ranks import DataRanks
from datasvc.loaders.core.mixture import Mixture, clock_steps, most_of, own_orders, splits_of
from datasvc.order import OrderConfig, lanes_of_rank
from datasvc.shards import Split


def follow_splits(
    samples: Split | Mixture, order: OrderConfig, cache: Cache, ranks: DataRanks, *, global_batch: int, prefetch: int
) -> list[PrefetchingShardStore]:
    """Return the shards of each split, for one rank of a loader.

    Args:
        samples: a split, or a mixture.
        order: the loader's.
        cache: the node's.
        ranks: which part of each global batch is this process's.
        global_batch: samples of a step over all ranks.
        prefetch: batches under way while the caller trains.

    Raises:
        CacheFullError: the cache's budget is below the windows that the order needs; says the number.
    """
    _check_windows(samples, order, cache, global_batch * (prefetch + 1))
    # A run of positions of a mixture lies on its splits' lanes in no fixed way: every rank is served from all.
    own_lanes = (
        None
        if isinstance(samples, Mixture)
        else lanes_of_rank(global_batch, rank=ranks.rank, world_size=ranks.world_size, lanes=order.lanes)
    )
    each = zip(splits_of(samples), own_orders(samples, order), clock_steps(samples), strict=True)
    return [
        PrefetchingShardStore(cache, split, own, own_lanes, num_ranks=ranks.world_size, step_bytes=step)
        for split, own, step in each
    ]


def _check_windows(samples: Split | Mixture, order: OrderConfig, cache: Cache, run: int) -> None:
    tables = [split.table for split in splits_of(samples)]
    needed = 0
    for table, own_run in zip(tables, most_of(samples, run), strict=True):
        window = window_bytes(table.samples_per_shard, table.bytes_per_shard, order, own_run)
        # At an epoch's boundary the last shards of one and the first of the next are needed together.
        needed += min(2 * window, int(footprint(table.bytes_per_shard).sum())) if own_run else 0
    room = cache.available_bytes({info.digest for table in tables for info in table.shards()})
    check_window(needed, room, f"the order of {samples!r}")
