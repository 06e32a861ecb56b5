"""Open shards of a split, with reference counts, for `SplitReader`.

A shard is opened at its first use, and released after its last reference is dropped. The access order decides how
long the references are held: see `WholeEpochUses` and `OrderedUses`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping

import numpy as np

from datasvc.keyed_random import Integers
from datasvc.order import NEVER, AccessOrder
from datasvc.shards import Shard, ShardRequest, ShardStore, Split
from datasvc.shards.format.overlaid_shard import overlaid
from datasvc.shards.format.shard_stores import open_listed_shard


class OpenShards:
    """Open shards and their reference counts. The last `drop` of a shard releases it to the store.

    With `in_parts`, the caller reads large blobs by `Shard.reader`.
    """

    def __init__(self, split: Split, store: ShardStore, *, in_parts: bool = False) -> None:
        self._in_parts = in_parts
        self._objects = store.objects(split.table)
        self._table = split.table
        self._store = store
        self._num_references: Counter[int] = Counter()
        self._open: dict[int, Shard] = {}
        self._observers: list[WholeEpochUses] = []

    def add_observer(self, observer: WholeEpochUses) -> None:
        """Report to `observer` all shards that are open, and later each shard when it is opened."""
        self._observers.append(observer)
        for shard in self._open:
            observer.opened(shard)

    def remove_observer(self, observer: WholeEpochUses) -> None:
        """Stop the reports to `observer`, if there are any."""
        if observer in self._observers:
            self._observers.remove(observer)

    def use(self, shard: int) -> None:
        """Add a reference to a shard, which need not be open yet."""
        self._num_references[shard] += 1

    def drop(self, shard: int) -> None:
        """Remove a reference; release the shard after the last one."""
        self._num_references[shard] -= 1
        if not self._num_references[shard]:
            del self._num_references[shard]
            self._release(shard)

    def get(self, shard: int) -> Shard:
        """Return the complete shard; wait until it is available. For errors see `open_listed_shard`."""
        if shard not in self._open:
            self._open[shard] = open_listed_shard(self._store, self._objects, self._table, shard)
            for observer in self._observers:
                observer.opened(shard)
        return self._open[shard]

    def get_all(self, rows_by_shard: Mapping[int, Integers]) -> dict[int, Shard]:
        """Return the shards of all keys. A shard that is not resident yet may contain only the requested rows."""
        if self._open.keys() >= rows_by_shard.keys():
            return {shard: self._open[shard] for shard in rows_by_shard}
        requests = {
            shard: ShardRequest(self._table.shard(shard), self._table.index(shard), rows, self._in_parts)
            for shard, rows in rows_by_shard.items()
            if shard not in self._open
        }
        opened_early = self._store.open_early(list(requests.values()))
        # Incomplete shards have only the rows of this batch, so they are not added to `_open`.
        incomplete: dict[int, Shard] = {}
        for shard, request in requests.items():
            if request.info.digest in opened_early:
                opened = opened_early[request.info.digest]
                incomplete[shard] = overlaid(self._objects, self._table, shard, opened)
        return {shard: incomplete[shard] if shard in incomplete else self.get(shard) for shard in rows_by_shard}

    def close(self) -> None:
        """Release all shards, and drop all references."""
        self._num_references.clear()
        self._observers.clear()
        for shard in list(self._open):
            self._release(shard)

    def _release(self, shard: int) -> None:
        if shard in self._open:
            self._store.release_shard(self._table.shard(shard))
            del self._open[shard]


class WholeEpochUses:
    """Holds the references of one epoch of a global shuffle: a shard that is open stays open until the epoch ends.

    A global shuffle may need any shard at any time. A split may have millions of shards, so a reference is added only
    when a shard is opened.
    """

    def __init__(self, shards: OpenShards, num_samples: int) -> None:
        self._shards = shards
        self._num_samples = num_samples
        self._referenced: list[int] = []
        shards.add_observer(self)

    def opened(self, shard: int) -> None:
        """Add a reference to an open shard, so that it stays open."""
        self._referenced.append(shard)
        self._shards.use(shard)

    def advance(self, stop: int) -> None:
        """Do nothing: `opened` adds the references that `OrderedUses.advance` would add."""

    def retire(self, position: int) -> None:
        """Drop all references at the end of the epoch."""
        if position >= self._num_samples:
            self.close()

    def close(self) -> None:
        """Drop all references."""
        self._shards.remove_observer(self)
        while self._referenced:
            self._shards.drop(self._referenced.pop())


class OrderedUses:
    """Holds the references of one epoch of a windowed or sequential order.

    Such an order needs a shard only in one or a few *windows*: ranges of positions.

    Args:
        shards: open shards of the split.
        order: access order of the epoch.
        start: first position of the epoch that is served. Shards that only earlier positions need get no references.
    """

    def __init__(self, shards: OpenShards, order: AccessOrder, start: int) -> None:
        self._shards = shards
        self._windows = order.windows  # each has its first position, its stop, and the shard that is needed
        self._start = start
        self._num_begun = 0  # number of windows whose first position was reached
        # First position of the next window.
        self._next_begin = int(self._windows.first[0]) if len(self._windows.first) else NEVER
        self._ends: list[tuple[int, int]] = []  # heap of (stop of the window, shard), one per reference

    def advance(self, stop: int) -> None:
        """Add references to the shards that positions before `stop` may need."""
        if stop <= self._next_begin:
            return
        windows = self._windows
        num_begun = int(np.searchsorted(windows.first, stop, side="left"))
        new = slice(self._num_begun, num_begun)
        is_needed = windows.stop[new] > self._start  # a window may end before the first position that is served
        ends, shards = windows.stop[new][is_needed].tolist(), windows.shards[new][is_needed].tolist()
        for end, shard in zip(ends, shards, strict=True):
            heapq.heappush(self._ends, (end, shard))
            self._shards.use(shard)
        self._num_begun = max(self._num_begun, num_begun)
        self._next_begin = int(windows.first[self._num_begun]) if self._num_begun < len(windows.first) else NEVER

    def retire(self, position: int) -> None:
        """Drop the references to shards that no position from `position` on needs."""
        while self._ends and self._ends[0][0] <= position:
            self._shards.drop(heapq.heappop(self._ends)[1])

    def close(self) -> None:
        """Drop all references."""
        while self._ends:
            self._shards.drop(self._ends.pop()[1])
