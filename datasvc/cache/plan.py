"""How much of the cache an order needs: pure."""

from __future__ import annotations

import numpy as np

from datasvc.errors import CacheFullError
from datasvc.keyed import Integers
from datasvc.order import OrderConfig, max_live_shards


def window_bytes(samples_per_shard: Integers, bytes_per_shard: Integers, config: OrderConfig, run: int) -> int:
    """Return the bytes that must be resident at once to serve `run` consecutive positions, in any epoch."""
    live = max_live_shards(samples_per_shard, config, run)
    return int(np.sort(bytes_per_shard)[::-1][:live].sum())


def check_window(needed_bytes: int, budget_bytes: int, what: str) -> None:
    """Refuse at the start what would starve or dead-lock later.

    Raises:
        CacheFullError: the window does not fit; says the number.
    """
    if needed_bytes > budget_bytes:
        raise CacheFullError(
            f"{what} needs {needed_bytes} bytes of the cache at once, its budget is {budget_bytes}; raise the "
            "budget, or use shuffle='windowed' with fewer lanes or smaller blocks"
        )
