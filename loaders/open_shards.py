"""The shards of a split that batches under way have open: opened when needed first, released when needed no more."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping

import numpy as np

from datasvc.keyed import Integers
from datasvc.order import AccessOrder
from datasvc.shards import Shard, ShardStore, Split, Wanted


class OpenShards:
    """Shards with their uses; a shard that was opened is released to the store with the last use of it.

    Args:
        split: whose shards.
        store: where they are opened.
    """

    def __init__(self, split: Split, store: ShardStore) -> None:
        self._table = split.table
        self._store = store
        self._uses: Counter[int] = Counter()
        self._open: dict[int, Shard] = {}

    def use(self, shard: int) -> None:
        """Say that the shard is going to be needed until `drop`."""
        self._uses[shard] += 1

    def drop(self, shard: int) -> None:
        """Take back one `use`."""
        self._uses[shard] -= 1
        if not self._uses[shard]:
            del self._uses[shard]
            self._release(shard)

    def get(self, shard: int) -> Shard:
        """Return a shard whole, waiting for it."""
        if shard not in self._open:
            self._open[shard] = self._store.open_shard(self._table.shard(shard))
        return self._open[shard]

    def get_all(self, wanted: Mapping[int, Integers]) -> dict[int, Shard]:
        """Return the shards of the wanted rows, all of a shard or no more than these rows."""
        closed = {
            shard: Wanted(self._table.shard(shard), self._table.index(shard), rows)
            for shard, rows in wanted.items()
            if shard not in self._open
        }
        early = self._store.open_early(list(closed.values())) if closed else {}
        return {
            shard: early[closed[shard].info.digest]
            if shard in closed and closed[shard].info.digest in early
            else self.get(shard)
            for shard in wanted
        }

    def close(self) -> None:
        """Release every shard, and forget all uses."""
        self._uses.clear()
        for shard in list(self._open):
            self._release(shard)

    def _release(self, shard: int) -> None:
        if shard in self._open:
            self._store.release_shard(self._table.shard(shard))
            del self._open[shard]


class OrderedUses:
    """What one epoch of a split's order uses of its shards.

    Args:
        shards: where the uses are counted.
        order: of that epoch.
        start: its first position that is served.
    """

    def __init__(self, shards: OpenShards, order: AccessOrder, start: int) -> None:
        self._shards = shards
        self._windows = order.windows
        self._start = start
        self._activated = 0
        self._ends: list[tuple[int, int]] = []  # heap of (stop, shard)

    def advance(self, stop: int) -> None:
        """Use the pieces of shards that positions before `stop` may need."""
        windows = self._windows
        until = int(np.searchsorted(windows.first, stop, side="left"))
        for piece in range(self._activated, until):
            if windows.stop[piece] > self._start:
                shard = int(windows.shards[piece])
                heapq.heappush(self._ends, (int(windows.stop[piece]), shard))
                self._shards.use(shard)
        self._activated = max(self._activated, until)

    def retire(self, position: int) -> None:
        """Drop the shards that no position from `position` on needs."""
        while self._ends and self._ends[0][0] <= position:
            self._shards.drop(heapq.heappop(self._ends)[1])

    def close(self) -> None:
        """Drop them all."""
        while self._ends:
            self._shards.drop(self._ends.pop()[1])
