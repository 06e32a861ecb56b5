"""A `ShardStore` whose waits are timed, by where the shards were when they were wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from datasvc.cache.fetch.fetch import Outcome
from datasvc.cache.prefetch.prefetching_store import PrefetchingShardStore
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage
from datasvc.repository import Digest, ObjectInfo
from datasvc.shards import Shard, ShardRequest, ShardStore

_STAGES: Final[Mapping[Outcome, Stage]] = {"resident": Stage.CACHE, "peer": Stage.PEER}


class TimedShards:
    """Shards of a store, timed: what the node's cache has as `cache`, all else as `peer` or `origin`.

    Args:
        store: where they come from.
        stopwatch: of the loader.
    """

    def __init__(self, store: ShardStore, stopwatch: StepProfiler) -> None:
        self._store = store
        self._followed = store if isinstance(store, PrefetchingShardStore) else None
        self._stopwatch = stopwatch

    def open_shard(self, info: ObjectInfo) -> Shard:
        """See `ShardStore.open_shard`."""
        with self._stopwatch.stage(Stage.ORIGIN) as timer:
            if self._followed is None:
                return self._store.open_shard(info)
            was_here = self._followed.is_resident(info)
            shard, outcome = self._followed.open(info)
            # What somebody else brought while this call waited is resident by now; it counts as the origin's.
            if was_here or outcome == "peer":
                timer.stage = _STAGES.get(outcome, Stage.ORIGIN)
            return shard

    def open_early(self, wanted: Sequence[ShardRequest]) -> Mapping[Digest, Shard]:
        """See `ShardStore.open_early`."""
        with self._stopwatch.stage(Stage.CACHE) as timer:
            if self._followed is not None and not all(self._followed.is_resident(each.info) for each in wanted):
                timer.stage = Stage.ORIGIN
            return self._store.open_early(wanted)

    def release_shard(self, info: ObjectInfo) -> None:
        """See `ShardStore.release_shard`."""
        with self._stopwatch.stage(Stage.CACHE):
            self._store.release_shard(info)

    def advance(self, epoch: int, position: int) -> None:
        """See `ShardStore.advance`."""
        self._store.advance(epoch, position)
