"""Cache space of an access order: shards in use at the same time, and the distance to fetch ahead. Pure.

Loaders and forecasts refuse an order that does not fit. The stager and forecasts choose how far to fetch ahead.
"""

from __future__ import annotations

import numpy as np

from datasvc.cache.catalogue.records import footprint
from datasvc.errors import CacheFullError
from datasvc.keyed_random import Integers
from datasvc.order import OrderConfig, max_live_shards

_MIN_SHARDS_AHEAD = 4


def window_bytes(samples_per_shard: Integers, bytes_per_shard: Integers, config: OrderConfig, run: int) -> int:
    """Return an upper bound, in bytes, of the disk space of the shards that `run` consecutive positions use."""
    live = max_live_shards(samples_per_shard, config, run)
    # Which shards these are depends on the epoch; the largest ones are an upper bound.
    used: Integers = footprint(np.sort(bytes_per_shard)[::-1][:live])
    return int(used.sum())


def choose_ahead_bytes(bytes_per_shard: Integers, budget_bytes: int) -> int:
    """Return the distance ahead of a job's clock, in bytes, up to which fetching a shard may evict other shards.

    A shard fetched ahead may displace one that is kept for the next epoch, so the distance is 1/32 of the budget.
    It is raised to four times the largest shard, to keep enough requests in progress, but at most to 1/16 of the
    budget. It is never less than the largest shard.
    """
    largest = int(bytes_per_shard.max(initial=0))
    # The clock counts bytes of shards, and the budget counts disk blocks.
    shard_budget = budget_bytes * int(bytes_per_shard.sum()) // max(1, int(footprint(bytes_per_shard).sum()))
    return max(largest, min(max(_MIN_SHARDS_AHEAD * largest, shard_budget // 32), shard_budget // 16))


def check_window(needed_bytes: int, budget_bytes: int, what: str) -> None:
    """Raise CacheFullError if the shards in use at the same time do not fit: the run would fail later.

    `what` names the access order in the message.
    """
    if needed_bytes > budget_bytes:
        raise CacheFullError(
            f"{what} needs {needed_bytes} bytes of the cache at once, and {budget_bytes} are available beside pinned "
            "objects; raise the budget, or use shuffle='windowed' with fewer lanes or smaller blocks"
        )
