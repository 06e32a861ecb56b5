"""Cache space that an access order needs: the window in use at once, and how far to fetch ahead. Pure."""

from __future__ import annotations

import numpy as np

from datasvc.cache.catalogue.records import footprint
from datasvc.errors import CacheFullError
from datasvc.keyed_random import Integers
from datasvc.order import OrderConfig, max_live_shards

_MIN_SHARDS_AHEAD = 4


def window_bytes(samples_per_shard: Integers, bytes_per_shard: Integers, config: OrderConfig, run: int) -> int:
    """Return the disk space of the shards that any `run` consecutive positions of an epoch use. Bytes."""
    live = max_live_shards(samples_per_shard, config, run)
    # The largest shards: an upper bound for every epoch.
    used: Integers = footprint(np.sort(bytes_per_shard)[::-1][:live])
    return int(used.sum())


def choose_ahead_bytes(bytes_per_shard: Integers, budget_bytes: int) -> int:
    """Return how far ahead of a job, in bytes of its clock, a shard may be fetched if that evicts others.

    Every byte fetched ahead displaces one that was kept for the next epoch, so this is a small share of the budget.
    It is at least one shard, and some more if shards are small, to keep enough requests in progress.
    """
    largest = int(bytes_per_shard.max(initial=0))
    # The clock counts bytes of shards, and the budget counts disk blocks.
    shard_budget = budget_bytes * int(bytes_per_shard.sum()) // max(1, int(footprint(bytes_per_shard).sum()))
    return max(largest, min(max(_MIN_SHARDS_AHEAD * largest, shard_budget // 32), shard_budget // 16))


def check_window(needed_bytes: int, budget_bytes: int, what: str) -> None:
    """Check at the start of a run that its window fits, because it would deadlock later.

    Args:
        needed_bytes: bytes that must be resident at once.
        budget_bytes: bytes available.
        what: what needs them, for the message.

    Raises:
        CacheFullError: the window does not fit into the budget.
    """
    if needed_bytes > budget_bytes:
        raise CacheFullError(
            f"{what} needs {needed_bytes} bytes of the cache at once, and {budget_bytes} are available beside pinned "
            "objects; raise the budget, or use shuffle='windowed' with fewer lanes or smaller blocks"
        )
