"""The shards of a split that batches under way have open: opened when needed first, released when needed no more."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping

import numpy as np

from datasvc.keyed_random import Integers
from datasvc.order import NEVER, AccessOrder
from datasvc.shards import Shard, ShardRequest, ShardStore, Split


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
        self._keepers: list[WholeEpochUses] = []

    def keep_all(self, keeper: WholeEpochUses) -> None:
        """Tell `keeper` of every shard that is open, and of those that are opened until `keep_no_more`."""
        self._keepers.append(keeper)
        for shard in self._open:
            keeper.opened(shard)

    def keep_no_more(self, keeper: WholeEpochUses) -> None:
        """Take back `keep_all`, if it was called."""
        if keeper in self._keepers:
            self._keepers.remove(keeper)

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
            for keeper in self._keepers:
                keeper.opened(shard)
        return self._open[shard]

    def get_all(self, wanted: Mapping[int, Integers]) -> dict[int, Shard]:
        """Return the shards of the wanted rows, all of a shard or no more than these rows."""
        if self._open.keys() >= wanted.keys():
            return {shard: self._open[shard] for shard in wanted}
        closed = {
            shard: ShardRequest(self._table.shard(shard), self._table.index(shard), rows)
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
        self._keepers.clear()
        for shard in list(self._open):
            self._release(shard)

    def _release(self, shard: int) -> None:
        if shard in self._open:
            self._store.release_shard(self._table.shard(shard))
            del self._open[shard]


class WholeEpochUses:
    """What one epoch of a global shuffle uses of its shards: each that it opens, to its end. Of millions few are.

    Args:
        shards: where the uses are counted.
        num_samples: of that epoch.
    """

    def __init__(self, shards: OpenShards, num_samples: int) -> None:
        self._shards = shards
        self._num_samples = num_samples
        self._used: list[int] = []
        shards.keep_all(self)

    def opened(self, shard: int) -> None:
        """Use a shard that is open."""
        self._used.append(shard)
        self._shards.use(shard)

    def advance(self, stop: int) -> None:
        """See `OrderedUses.advance`."""

    def retire(self, position: int) -> None:
        """See `OrderedUses.retire`."""
        if position >= self._num_samples:
            self.close()

    def close(self) -> None:
        """Drop them all."""
        self._shards.keep_no_more(self)
        while self._used:
            self._shards.drop(self._used.pop())


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
        self._next = int(self._windows.first[0]) if len(self._windows.first) else NEVER  # first of the next piece
        self._ends: list[tuple[int, int]] = []  # heap of (stop, shard)

    def advance(self, stop: int) -> None:
        """Use the pieces of shards that positions before `stop` may need."""
        if stop <= self._next:
            return
        windows = self._windows
        until = int(np.searchsorted(windows.first, stop, side="left"))
        new = slice(self._activated, until)
        needed = windows.stop[new] > self._start  # of a run that began far in the epoch, few
        ends, shards = windows.stop[new][needed].tolist(), windows.shards[new][needed].tolist()
        for end, shard in zip(ends, shards, strict=True):
            heapq.heappush(self._ends, (end, shard))
            self._shards.use(shard)
        self._activated = max(self._activated, until)
        self._next = int(windows.first[self._activated]) if self._activated < len(windows.first) else NEVER

    def retire(self, position: int) -> None:
        """Drop the shards that no position from `position` on needs."""
        while self._ends and self._ends[0][0] <= position:
            self._shards.drop(heapq.heappop(self._ends)[1])

    def close(self) -> None:
        """Drop them all."""
        while self._ends:
            self._shards.drop(self._ends.pop()[1])
