"""A `ShardStore` that times each access. A profile then shows whether shards come from cache, peer or origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from datasvc.cache.job import Outcome
from datasvc.cache.prefetch.prefetching_store import PrefetchingShardStore
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage
from datasvc.repository import Digest, ObjectInfo, Objects
from datasvc.shards import Shard, ShardRequest, ShardStore
from datasvc.shards.format.shard_table import ShardTable

# All other outcomes count as `Stage.ORIGIN`.
_STAGES: Final[Mapping[Outcome, Stage]] = {"resident": Stage.CACHE, "peer": Stage.PEER}


class TimedShards:
    """A shard store with timed accesses: resident shards count as `cache`, others as `peer` or `origin`.

    The loader puts it around the store of each split.

    Args:
        store: the store that opens the shards.
        profiler: profiler of the loader.
    """

    def __init__(self, store: ShardStore, profiler: StepProfiler) -> None:
        self._store = store
        self._cached_store = store if isinstance(store, PrefetchingShardStore) else None
        self._profiler = profiler

    def open_shard(self, info: ObjectInfo) -> Shard:
        """See `ShardStore.open_shard`."""
        with self._profiler.stage(Stage.ORIGIN) as timer:
            if self._cached_store is None:
                return self._store.open_shard(info)
            was_resident = self._cached_store.is_resident(info)
            shard, outcome = self._cached_store.open(info)
            # If another process fetched the shard while this call waited, the outcome is "resident", but the time was
            # spent on a fetch. So count the time as `origin`, unless the shard was resident before.
            if was_resident or outcome == "peer":
                timer.stage = _STAGES.get(outcome, Stage.ORIGIN)
            return shard

    def objects(self, table: ShardTable) -> Objects:
        """See `ShardStore.objects`."""
        return self._store.objects(table)

    def open_early(self, requests: Sequence[ShardRequest]) -> Mapping[Digest, Shard]:
        """See `ShardStore.open_early`."""
        store = self._cached_store
        with self._profiler.stage(Stage.CACHE) as timer:
            # One call has one stage: if any shard is not resident, count the whole call as a fetch.
            if store is not None and not all(store.is_resident(request.info) for request in requests):
                timer.stage = Stage.ORIGIN
            opened = self._store.open_early(requests)
            if opened:
                timer.stage = Stage.ORIGIN
            return opened

    def release_shard(self, info: ObjectInfo) -> None:
        """See `ShardStore.release_shard`."""
        with self._profiler.stage(Stage.CACHE):
            self._store.release_shard(info)

    def advance(self, epoch: int, position: int) -> None:
        """See `ShardStore.advance`."""
        self._store.advance(epoch, position)
