"""The shards of a job whose order is known: fetched ahead by a stager, evicted by when they are needed again."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from datasvc.cache.cache import Cache
from datasvc.cache.fetch.fetch import Outcome
from datasvc.cache.prefetch.partial_shards import PartialShardReader
from datasvc.cache.prefetch.stager import Stager, StagerJob
from datasvc.cache.prefetch.timeline import UseTimeline
from datasvc.errors import DatasvcError
from datasvc.order import NextUse, OrderConfig
from datasvc.repository import Digest, ObjectInfo
from datasvc.shards import ShardRequest, Split
from datasvc.shards.format.reader import Shard

_SHARDS_AT_ONCE = 4


class PrefetchingShardStore:
    """The shards of one split through a node's cache, for one order: a `ShardStore`.

    The stager starts when a shard is missing for the first time: data that is all here needs none. Until it is up,
    and wherever it is late, the shards that a batch lacks are fetched side by side from here.

    Args:
        cache: the node's.
        split: the samples.
        config: the order's parameters.
        lanes: those that this process is served from; None: all.
        num_ranks: of the job: what is read early is shared among them.
        step_bytes: see `UseTimeline`.
    """

    def __init__(
        self,
        cache: Cache,
        split: Split,
        config: OrderConfig,
        lanes: Sequence[int] | None = None,
        *,
        num_ranks: int = 1,
        step_bytes: int | None = None,
    ) -> None:
        self._cache = cache
        self._shards = cache.shards(split.repository)
        self._split, self._config, self._lanes = split, config, lanes
        self._step_bytes = step_bytes
        self._timeline = UseTimeline(split.table, config, lanes, step_bytes=step_bytes)
        self._numbers = {info.digest: number for number, info in enumerate(split.table.shards())}
        self._cursor = (0, 0)
        # Two loaders of one process are two jobs: each has its own clock.
        self._owner = cache.new_owner(f"{split.dataset}/{split.name}")
        self._early = PartialShardReader(
            split.repository.objects, split.table.size_bytes, num_ranks=num_ranks, count=cache.count
        )
        self._stager: Stager | None = None
        self._fetching: set[Digest] = set()
        self._threads: ThreadPoolExecutor | None = None

    def open_shard(self, info: ObjectInfo) -> Shard:
        """See `CachedShards.open_shard`."""
        return self.open(info)[0]

    def open(self, info: ObjectInfo) -> tuple[Shard, Outcome]:
        """Return the shard as `open_shard` does, and where it came from."""
        shard, outcome = self._shards.open(info)
        self._early.forget(info.digest)
        if outcome != "resident" and self._stager is None:
            self._start()
        return shard, outcome

    def is_resident(self, info: ObjectInfo) -> bool:
        """See `CachedShards.is_resident`."""
        return self._shards.is_resident(info)

    def open_early(self, wanted: Sequence[ShardRequest]) -> Mapping[Digest, Shard]:
        """Return shards still in transfer whose wanted samples were read one by one; see `PartialShardReader`."""
        missing = [each for each in wanted if not self._shards.is_resident(each.info)]
        if missing and self._stager is None:
            self._start()
        for each in missing:
            self._fetch(each.info)
        return self._early.read(missing)

    def release_shard(self, info: ObjectInfo) -> None:
        """Let the shard be evicted once it is the one that is needed last."""
        reuse = self._timeline.reuse(self._numbers[info.digest], *self._cursor)
        self._shards.release_shard(info, reuse, owner=self._owner)

    def advance(self, epoch: int, position: int) -> None:
        """Say that everything before a position was served: the stager goes on."""
        self._cursor = (epoch, position)
        if self._stager is not None:
            self._stager.advance(epoch, position)

    def close(self) -> None:
        """End the stager; what is held stays so until released."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
            self._fetching.clear()
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def _fetch(self, info: ObjectInfo) -> None:
        """Begin to fetch what is needed now; what becomes of it shows when it is opened."""

        def fetch() -> None:
            now = self._timeline.clock(*self._cursor)
            try:
                with suppress(DatasvcError):  # whoever opens the shard meets the same
                    self._cache.prefetch(info, self._split.repository, NextUse(now, now), owner=self._owner)
            finally:
                self._fetching.discard(info.digest)

        # More wait for the stager, which is better at it, or for whoever opens them.
        if info.digest in self._fetching or len(self._fetching) >= _SHARDS_AT_ONCE:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_SHARDS_AT_ONCE, thread_name_prefix="datasvc-missing")
            weakref.finalize(self, self._threads.shutdown, wait=False, cancel_futures=True)
        self._fetching.add(info.digest)
        self._threads.submit(fetch)

    def _start(self) -> None:
        epoch, position = self._cursor
        job = StagerJob(
            self._cache.folder,
            self._cache.tenant,
            self._cache.peers,
            self._split,
            self._config,
            self._lanes,
            epoch,
            position,
            self._owner,
            self._step_bytes,
        )
        self._stager = Stager(job)
        weakref.finalize(self, self._stager.close)
