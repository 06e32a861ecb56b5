"""`CachedShards` reads the shards of one repository through a node's cache, in any order.

`Cache.shards` returns one. `PrefetchingShardStore` uses one to read in a known access order.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from datasvc.cache.catalogue.next_use import bias_owned
from datasvc.cache.job import CacheJob, Outcome
from datasvc.order import NextUse
from datasvc.repository import Digest, ObjectInfo, Repository
from datasvc.shards.format.reader import Shard
from datasvc.shards.versions.dataset import ShardRequest


class CachedShards:
    """A `ShardStore` of one repository that reads through a node's cache, for one job.

    Shards that were not released are released when this object is garbage-collected; `job` stays open until then.
    """

    def __init__(self, job: CacheJob, repository: Repository) -> None:
        self._job = job
        self._repository = repository
        self._held: Counter[Digest] = Counter()  # number of holds (locks against eviction) on each shard
        # The finalizer refers to the job, which therefore stays open until the holds are released.
        weakref.finalize(self, job.abandon, self._held)

    def open_shard(self, info: ObjectInfo) -> Shard:
        """Return the shard, mapped from the cache; it is not evicted before `release_shard`.

        Raises:
            CacheFullError, CorruptDataError, NotFoundError, UnavailableError: see `CacheJob.acquire`.
        """
        return self.open(info)[0]

    def open(self, info: ObjectInfo) -> tuple[Shard, Outcome]:
        """Return the shard as `open_shard` does, and its outcome: "resident", "origin" or "peer"."""
        name, outcome = self._job.hold(info, self._repository)
        self._held[info.digest] += 1
        try:
            return Shard.map(name), outcome
        except BaseException:
            self.release_shard(info)
            raise

    def release_shard(self, info: ObjectInfo, reuse: NextUse | None = None) -> None:
        """Allow the shard to be evicted when space is needed; existing views of it stay readable.

        Args:
            info: the shard.
            reuse: next use of the shard by this job; None: unknown.
        """
        peers = self._job.peers
        if reuse is not None and peers is not None and peers.num_nodes > 1:
            # A node keeps the objects that it owns longer than others, because other nodes request them from it.
            owned = np.array([peers.owns(info.digest)])
            biased = bias_owned(np.array([reuse.next_use]), owned)
            reuse = NextUse(reuse.now, int(biased[0]))
        self._job.release(info.digest, reuse)
        self._held[info.digest] -= 1

    def is_resident(self, info: ObjectInfo) -> bool:
        """Return whether a shard can be opened without a fetch. Raises ConfigError in a forked child."""
        return self._job.is_resident(info)

    def open_early(self, wanted: Sequence[ShardRequest]) -> Mapping[Digest, Shard]:  # noqa: ARG002 - see `ShardStore`
        """Return {}: `open_shard` of this store waits until the shard is complete."""
        return {}

    def advance(self, epoch: int, position: int) -> None:
        """Do nothing: this store declares a next use only in `release_shard`."""
