"""How much of the cache an order needs: pure."""

from __future__ import annotations

import numpy as np

from datasvc.cache.catalogue.records import footprint
from datasvc.errors import CacheFullError
from datasvc.keyed_random import Integers
from datasvc.order import OrderConfig, max_live_shards

_SHARDS_AHEAD = 4


def window_bytes(samples_per_shard: Integers, bytes_per_shard: Integers, config: OrderConfig, run: int) -> int:
    """Return the bytes of the disk that `run` consecutive positions need resident at once, in any epoch."""
    live = max_live_shards(samples_per_shard, config, run)
    used: Integers = footprint(np.sort(bytes_per_shard)[::-1][:live])
    return int(used.sum())


def choose_ahead_bytes(bytes_per_shard: Integers, budget_bytes: int) -> int:
    """Return how far ahead of a job, on its clock, shards are fetched at the price of others.

    Every byte of it is one that is fetched before its time instead of kept for the next epoch, so it is a small share
    of the budget; but one shard in any case, and some more where that is little, to have enough requests under way.
    """
    largest = int(bytes_per_shard.max(initial=0))
    # The clock counts bytes of shards, the budget blocks of the disk.
    room = budget_bytes * int(bytes_per_shard.sum()) // max(1, int(footprint(bytes_per_shard).sum()))
    return max(largest, min(max(_SHARDS_AHEAD * largest, room // 32), room // 16))


def check_window(needed_bytes: int, budget_bytes: int, what: str) -> None:
    """Refuse at the start what would starve or dead-lock later.

    Raises:
        CacheFullError: the window does not fit; says the number.
    """
    if needed_bytes > budget_bytes:
        raise CacheFullError(
            f"{what} needs {needed_bytes} bytes of the cache at once, its budget is {budget_bytes} without what is "
            "pinned beside; raise the budget, or use shuffle='windowed' with fewer lanes or smaller blocks"
        )
