"""A shard store for a known access order: a stager fetches shards ahead, and eviction follows their next uses.

Loaders with `cache=` read through it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from datasvc.cache.cache import Cache
from datasvc.cache.catalogue.next_use import UseTimeline
from datasvc.cache.job import CachedShards, Outcome
from datasvc.cache.prefetch.stager import Stager, StagerJob
from datasvc.errors import CorruptDataError, DatasvcError
from datasvc.order import NextUse, OrderConfig
from datasvc.repository import Digest, ObjectInfo, Objects
from datasvc.shards import Shard, ShardRequest, Split
from datasvc.shards.format.partial_reader import PartialShard, open_partial
from datasvc.shards.format.shard_table import ShardTable

_MAX_FETCHES = 4  # at once, by the threads of one store


_MAX_SHARE = 0.02  # of the bytes of a split, for all ranks together
_MAX_BYTES = 512 << 20  # per process: samples stay in memory until their shards are resident
_MAX_REQUESTS = 16


class PrefetchingShardStore:
    """A `ShardStore` of one split that reads through a node's cache in one access order.

    The stager starts when a shard is missing for the first time: data that is fully resident needs no stager. If
    shards of a batch are still missing when the batch needs them, this process fetches them itself, in parallel.

    Args:
        cache: cache of the node.
        split: split to read.
        config: parameters of the access order.
        lanes: lanes that this process reads; None: all.
        num_ranks: number of ranks of the job. Together they may read only a small part of the split by
            `open_early`, see `PartialShardReader`.
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
        # One job per store, because each loader of a process needs a clock of its own: the bytes that it has served.
        self._job = cache.new_job(f"{split.dataset}/{split.name}")
        self._shards = CachedShards(self._job, split.repository)
        self._split = split
        self._stager_job = StagerJob(self._job, split, config, lanes, epoch=0, position=0, step_bytes=step_bytes)
        self._timeline = UseTimeline(split.table, config, lanes, step_bytes=step_bytes)
        self._numbers = {info.digest: number for number, info in enumerate(split.table.shards())}
        self._cursor = (0, 0)  # epoch and position before which all samples were served
        self._partial_shards = PartialShardReader(
            split.repository.objects, split.table.size_bytes, num_ranks=num_ranks, count=self._job.count
        )
        self._stager: Stager | None = None
        self._fetching: set[Digest] = set()  # shards that the threads of this store fetch
        self._threads: ThreadPoolExecutor | None = None

    def open_shard(self, info: ObjectInfo) -> Shard:
        """Return the shard, mapped from the cache; for errors see `CachedShards.open_shard`."""
        return self.open(info)[0]

    def open(self, info: ObjectInfo) -> tuple[Shard, Outcome]:
        """Return the shard as `open_shard` does, and its outcome: "resident", "origin" or "peer"."""
        shard, outcome = self._shards.open(info)
        self._partial_shards.forget(info.digest)
        if outcome != "resident" and self._stager is None:
            self._start()
        return shard, outcome

    def objects(self, table: ShardTable) -> Objects:
        """See `CachedShards.objects`."""
        return self._shards.objects(table)

    def is_resident(self, info: ObjectInfo) -> bool:
        """Return whether a shard can be opened without a fetch."""
        return self._shards.is_resident(info)

    def open_early(self, wanted: Sequence[ShardRequest]) -> Mapping[Digest, Shard]:
        """Start to fetch the missing shards. Meanwhile, read only their wanted samples, by `PartialShardReader`.

        Returns:
            The missing shards, each with its wanted samples; {} if no shard is missing, the limit of such reads is
            reached, or one has failed.
        """
        missing = [request for request in wanted if not self._shards.is_resident(request.info)]
        if missing and self._stager is None:
            self._start()
        for request in missing:
            self._fetch(request.info)
        return self._partial_shards.read(missing)

    def release_shard(self, info: ObjectInfo) -> None:
        """Allow the shard to be evicted, and declare its next use by this job."""
        reuse = self._timeline.reuse(self._numbers[info.digest], *self._cursor)
        self._shards.release_shard(info, reuse)

    def advance(self, epoch: int, position: int) -> None:
        """Record the position before which all samples were served, and send it to the stager if one runs."""
        self._cursor = (epoch, position)
        if self._stager is not None:
            self._stager.advance(epoch, position)

    def close(self) -> None:
        """End the stager. Shards that are in use stay open until they are released."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
            self._fetching.clear()
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def _fetch(self, info: ObjectInfo) -> None:
        """Start a fetch of a shard that is needed now, in another thread, unless too many are in progress."""

        def fetch() -> None:
            now = self._timeline.clock(*self._cursor)
            try:
                with suppress(DatasvcError):  # `open` will get the same error, and report it
                    self._job.prefetch(info, self._split.repository, NextUse(now, now))  # the next use is now
            finally:
                self._fetching.discard(info.digest)

        # If _MAX_FETCHES are in progress, the stager fetches this shard when its turn comes, or `open` does.
        if info.digest in self._fetching or len(self._fetching) >= _MAX_FETCHES:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_MAX_FETCHES, thread_name_prefix="datasvc-missing")
            weakref.finalize(self, self._threads.shutdown, wait=False, cancel_futures=True)
        self._fetching.add(info.digest)
        self._threads.submit(fetch)

    def _start(self) -> None:
        """Start the stager at the job's position."""
        epoch, position = self._cursor
        self._stager = Stager(replace(self._stager_job, epoch=epoch, position=position))
        weakref.finalize(self, self._stager.close)


# A shard takes a second or more to arrive, and a sample takes some milliseconds. But each byte that is read early
# arrives again with its shard, so only a small share is read early.


class PartialShardReader:
    """Reads samples of shards that are not resident, up to a limit of bytes. For one thread.

    Args:
        objects: store of the shards.
        split_bytes: size of all shards; all ranks together may read 2 % of it early.
        num_ranks: number of ranks of the job.
        count: called with the name of a counter of the cache and the number to add.
    """

    def __init__(
        self, objects: Objects, split_bytes: int, *, num_ranks: int = 1, count: Callable[[str, int], None]
    ) -> None:
        self._objects = objects
        self._remaining_bytes = min(int(split_bytes * _MAX_SHARE) // num_ranks, _MAX_BYTES)
        self._count = count
        self._partial: dict[Digest, PartialShard | None] = {}  # None: the shard cannot be read by samples

    def read(self, requests: Sequence[ShardRequest]) -> Mapping[Digest, Shard]:
        """Return shards that contain the requested rows.

        If the limit is reached, or a row cannot be read, return {}. Every later call then returns {} too.
        """
        if not requests or not self._remaining_bytes:
            return {}
        try:
            with ThreadPoolExecutor(_MAX_REQUESTS, thread_name_prefix="datasvc-early") as pool:
                return self._read(requests, pool)
        except DatasvcError as error:
            # Not raised: the fetch of the complete shard meets the same error, tries other sources, and reports it.
            if isinstance(error, CorruptDataError):
                self._count("corrupt", 1)
            self.stop()
            return {}

    def forget(self, digest: Digest) -> None:
        """Discard the samples of a shard that is resident now."""
        self._partial.pop(digest, None)

    def stop(self) -> None:
        """Read no more samples, and discard those that were read."""
        self._remaining_bytes = 0
        self._partial.clear()

    def _read(self, requests: Sequence[ShardRequest], pool: ThreadPoolExecutor) -> Mapping[Digest, Shard]:
        """See `read`; `pool` sends the ranged requests in parallel."""
        unopened = [request for request in requests if request.info.digest not in self._partial]
        for request, partial in zip(unopened, pool.map(self._open, unopened), strict=True):
            self._partial[request.info.digest] = partial
        opened = {
            request: partial for request in requests if (partial := self._partial[request.info.digest]) is not None
        }
        reads = [(partial, read) for request, partial in opened.items() for read in partial.plan(request.rows)]
        size_bytes = sum(read.size_bytes for _, read in reads)
        # If one shard cannot be read by samples, the batch waits for it anyway: early reads of the other shards do
        # not make the batch ready sooner.
        if len(opened) < len(requests) or size_bytes > self._remaining_bytes:
            self.stop()
            return {}
        self._remaining_bytes -= size_bytes
        # The spans (byte ranges) of all shards are read in parallel; `contents` is in their order.
        spans = [(partial.info.digest, span) for partial, read in reads for span in read.spans]
        contents = pool.map(lambda pair: self._objects.read_range(pair[0], pair[1].offset, pair[1].length), spans)
        for partial, read in reads:
            partial.add(read, [next(contents) for _ in read.spans])
        self._count("early_bytes", size_bytes)
        self._count("origin_bytes", size_bytes)
        return {request.info.digest: partial for request, partial in opened.items()}

    def _open(self, request: ShardRequest) -> PartialShard | None:
        return open_partial(self._objects, request.info, request.index)
