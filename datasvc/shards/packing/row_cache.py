"""Row numbers of shards: a cache of them, limited by their number, and the other rows that stand for rows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import pairwise

import numpy as np

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


class RowMap:
    """Maps rows of shards to other rows: row r of a shard to `find(shard)[r]`. Safe for use by several threads.

    Args:
        counts: number of rows to map of each shard, `int64[shards]`.
        find: returns the rows of a shard, `int64[counts[shard]]`; None: each row stands for itself.
        max_rows: if there are not more rows to map, those found are kept, with 4 bytes each.
    """

    def __init__(self, counts: Integers, find: Callable[[int], Integers | None], max_rows: int) -> None:
        self._counts, self._find = counts, find
        self._firsts = np.cumsum(counts) - counts
        # The rows of all shards one after the other, found when a shard is first mapped: one lookup for a batch.
        self._kept = np.empty(counts.sum(), np.int32) if counts.sum() <= max_rows else None
        self._is_found = np.zeros(len(counts), np.bool_)

    def __call__(self, shards: Integers, rows: Integers) -> Integers:
        """Return the rows that stand for rows, `int64[n]`, of `shards`, `int64[n]`. Raises what `find` raises."""
        if self._kept is not None:
            for shard in np.unique(shards[~self._is_found[shards]]).tolist():
                found, first, count = self._find(shard), self._firsts[shard], self._counts[shard]
                self._kept[first : first + count] = np.arange(count) if found is None else found
                self._is_found[shard] = True
            kept: Integers = self._kept[self._firsts[shards] + rows].astype(np.int64)
            return kept
        mapped = np.empty_like(rows)
        by_shard = np.argsort(shards, kind="stable")
        cuts = np.flatnonzero(np.diff(shards[by_shard])) + 1
        for start, stop in pairwise([0, *cuts.tolist(), len(by_shard)] if len(by_shard) else []):
            chosen = by_shard[start:stop]
            found = self._find(int(shards[chosen[0]]))
            mapped[chosen] = rows[chosen] if found is None else found[rows[chosen]]
        return mapped
