"""A cache of row numbers of shards, limited by their number."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from datasvc.keyed_random import Integers


class RowCache:
    """Rows of shards, the least recently used of which are dropped. Safe for use by several threads.

    Args:
        max_rows: largest number of rows of all entries; the newest entry stays even if it exceeds it alone.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._cached: OrderedDict[Hashable, Integers] = OrderedDict()  # least recently used first
        self._num_rows = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, compute: Callable[[], Integers]) -> Integers:
        """Return the rows of a key, computed if they are not kept. Do not modify the array."""
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
                return self._cached[key]
        # Computed without the lock: two threads may compute the same rows, but no thread waits for another shard's.
        rows = compute()
        with self._lock:
            if key not in self._cached:
                self._cached[key] = rows
                self._num_rows += len(rows)
            while self._num_rows > self._max_rows and len(self._cached) > 1:
                self._num_rows -= len(self._cached.popitem(last=False)[1])
        return rows
