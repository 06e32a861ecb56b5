"""Simulates the traffic of caches for a known sequence of uses, without data. Pure.

Each node has a cache with the eviction policy of the real one. Each shard may have an owner: the only node that
reads it from the origin.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from datasvc.cache.catalogue.eviction import UNKNOWN, EvictionCandidate, choose_victims
from datasvc.cache.catalogue.next_use import Uses, bias_owned, next_uses
from datasvc.cache.catalogue.quotas import DEFAULT_TENANT, Account
from datasvc.errors import CacheFullError
from datasvc.keyed_random import Integers
from datasvc.order import NEVER
from datasvc.repository import Digest


class SimulatedCache:
    """A cache of shards. `eviction.choose_victims` chooses the shards to evict among those without a hold.

    Args:
        sizes: bytes of each shard, by number.
        budget_bytes: limit of the bytes of all resident shards.
    """

    def __init__(self, sizes: Sequence[int], budget_bytes: int) -> None:
        self._sizes = sizes
        self._budget_bytes = budget_bytes
        self._resident: set[int] = set()
        self._holds: Counter[int] = Counter()
        self._evictable: list[tuple[int, int]] = []  # (next use, shard) ascending: the last one is evicted first
        self._next_uses: dict[int, int] = {}  # of the evictable shards
        self._num_unknown = 0
        self.resident_bytes = 0

    def missing(self, shard: int) -> int:
        """Return the bytes to fetch before a shard can be used; 0 if it is resident."""
        return 0 if shard in self._resident else self._sizes[shard]

    def hold(self, shard: int) -> None:
        """Add a hold on a shard, which is not evicted before `release`."""
        self._holds[shard] += 1
        if shard in self._next_uses:
            self._remove_evictable(shard)

    def release(self, shard: int, next_use: int) -> None:
        """Remove a hold, and declare the next use of the shard: a time, UNKNOWN or NEVER."""
        self._holds[shard] -= 1
        if self._holds[shard] or shard not in self._resident:
            return
        if next_use >= UNKNOWN:
            # Of unknown next uses, the shard released last is evicted first, as in the real cache.
            self._num_unknown += 1
            next_use += self._num_unknown
        self._next_uses[shard] = next_use
        bisect.insort(self._evictable, (next_use, shard))

    def make_resident(self, shard: int, now: int, min_distance_bytes: int = -NEVER) -> bool:
        """Make a shard resident. The caller has a hold on it.

        Args:
            shard: number of the shard.
            now: present time on the clock of the simulated job, in bytes.
            min_distance_bytes: only shards whose next use is further from `now` than this are evicted.

        Returns:
            True if the shard is resident now; False if there is no space, and nothing was changed.
        """
        needed = self.missing(shard)
        account = Account(self._budget_bytes, {}, {DEFAULT_TENANT: self.resident_bytes})  # one tenant, without quota
        victims = choose_victims(
            self._candidates(now), account, DEFAULT_TENANT, needed, min_distance_bytes=min_distance_bytes
        )
        # `choose_victims` has subtracted the victims from `account`.
        if account.missing(DEFAULT_TENANT, needed) > 0:
            return False
        for victim in victims:
            self._resident.remove(int(victim.digest))
            self._remove_evictable(int(victim.digest))
        self._resident.add(shard)
        self.resident_bytes += needed - sum(victim.freed_bytes for victim in victims)
        return True

    def _candidates(self, now: int) -> Iterator[EvictionCandidate]:
        for next_use, shard in reversed(self._evictable):
            # The policy does not look into digests, so the number of the shard stands for its digest.
            yield EvictionCandidate(Digest(str(shard)), self._sizes[shard], DEFAULT_TENANT, next_use - now)

    def _remove_evictable(self, shard: int) -> None:
        entry = (self._next_uses.pop(shard), shard)
        del self._evictable[bisect.bisect_left(self._evictable, entry)]


# Kinds of events. Those at the same time are sorted by these numbers: a release comes first, because it makes space.
_RELEASE, _ACQUIRE, _PREFETCH = 0, 1, 2


@dataclass
class EpochTraffic:
    """Traffic of one epoch, over all nodes.

    Attributes:
        used_bytes: bytes of the used shards, counted once per use.
        hit_bytes: used bytes that the cache of the node had.
        origin_bytes: bytes read from the origin.
        peer_bytes: bytes read from other nodes.
        late_bytes: bytes that were not fetched before they were needed.
    """

    used_bytes: int = 0
    hit_bytes: int = 0
    origin_bytes: int = 0
    peer_bytes: int = 0
    late_bytes: int = 0


@dataclass(frozen=True)
class Replay:
    """Result of a simulation.

    Attributes:
        epochs: traffic of each epoch.
        resident_bytes: resident bytes of each node's cache at the end.
    """

    epochs: list[EpochTraffic]
    resident_bytes: list[int]


def replay(
    nodes: Sequence[Uses],
    bytes_per_shard: Integers,
    budget_bytes: int,
    *,
    ahead_bytes: int = 0,
    owners: Integers | None = None,
) -> Replay:
    """Simulate caches that are empty at first; all nodes read at the same rate.

    Args:
        nodes: uses of each node; there is at least one use. As in the real cache, evictions compare next uses until
            the end of the next epoch, and nodes keep owned shards longer than others, see `bias_owned`.
        bytes_per_shard: `int64[num_shards]`.
        budget_bytes: budget of each node's cache.
        ahead_bytes: fetch shards that are needed within this distance, unless the fetch would evict shards needed
            sooner; 0: fetch a shard when it is needed.
        owners: `int64[num_shards]`, the node that reads each shard from the origin for all; None: each node reads
            all its shards from the origin. An owner outside of `nodes` is not simulated, and always has its shards.

    Raises:
        CacheFullError: the shards in use at once exceed the budget.
    """
    sizes = bytes_per_shard.tolist()
    cluster = _SimulatedCaches([SimulatedCache(sizes, budget_bytes) for _ in nodes], sizes, owners)
    next_use_times = [next_uses(uses) for uses in nodes]
    if owners is not None:
        next_use_times = [
            bias_owned(times, owners[uses.shards] == node)
            for node, (uses, times) in enumerate(zip(nodes, next_use_times, strict=True))
        ]
    epoch_numbers = np.concatenate([uses.epochs for uses in nodes])
    first_epoch = int(epoch_numbers.min())
    epochs = [EpochTraffic() for _ in range(int(epoch_numbers.max()) + 1 - first_epoch)]
    for now, kind, node, use in _events(nodes, ahead_bytes):
        shard = int(nodes[node].shards[use])
        traffic = epochs[int(nodes[node].epochs[use]) - first_epoch]
        if kind == _RELEASE:
            cluster.caches[node].release(shard, int(next_use_times[node][use]))
        elif kind == _ACQUIRE:
            cluster.acquire(node, shard, now, traffic)
        else:
            cluster.prefetch(node, shard, now, traffic, int(nodes[node].first[use]))
    return Replay(epochs, [cache.resident_bytes for cache in cluster.caches])


def _events(nodes: Sequence[Uses], ahead_bytes: int) -> Iterator[tuple[int, ...]]:
    """Yield (time, kind, node, number of the use) of each event, sorted by time, kind, number and node."""
    columns: list[tuple[Integers, int, int]] = []
    for node, uses in enumerate(nodes):
        columns += [(uses.stop, _RELEASE, node), (uses.first, _ACQUIRE, node)]
        if ahead_bytes:
            columns.append((uses.first - ahead_bytes, _PREFETCH, node))
    times = np.concatenate([column for column, _, _ in columns])
    kinds = np.concatenate([np.full(len(column), kind) for column, kind, _ in columns])
    node_numbers = np.concatenate([np.full(len(column), node) for column, _, node in columns])
    numbers = np.concatenate([np.arange(len(column)) for column, _, _ in columns])
    by_time = np.lexsort((node_numbers, numbers, kinds, times))
    return zip(*(column[by_time].tolist() for column in (times, kinds, node_numbers, numbers)), strict=True)


class _SimulatedCaches:
    """The caches of all nodes, and the transfers between them."""

    def __init__(self, caches: Sequence[SimulatedCache], sizes: Sequence[int], owners: Integers | None) -> None:
        self.caches = caches
        self._sizes = sizes
        self._owners = owners
        self._prefetched: set[tuple[int, int]] = set()  # (node, shard)

    def acquire(self, node: int, shard: int, now: int, traffic: EpochTraffic) -> None:
        """Begin the use of a shard by a node: fetch the shard if it is missing. Raises CacheFullError."""
        cache = self.caches[node]
        cache.hold(shard)
        missing = cache.missing(shard)
        traffic.used_bytes += self._sizes[shard]
        # The bytes of a prefetched shard were counted when it was fetched, so they are not counted as a hit.
        if (node, shard) not in self._prefetched:
            traffic.hit_bytes += self._sizes[shard] - missing
        self._prefetched.discard((node, shard))
        if not missing:
            return
        if not cache.make_resident(shard, now):
            raise CacheFullError(
                f"the shards in use leave less than {missing} bytes of the budget free when the job has read {now} "
                "bytes; raise the budget, or use shuffle='windowed' with fewer lanes or smaller blocks"
            )
        traffic.late_bytes += missing
        self._fetch(node, shard, missing, now, traffic)

    def prefetch(self, node: int, shard: int, now: int, traffic: EpochTraffic, needed_at: int) -> None:
        """Fetch a missing shard that a node needs later, if the cache has space for it."""
        cache = self.caches[node]
        missing = cache.missing(shard)
        cache.hold(shard)
        if missing and cache.make_resident(shard, now, min_distance_bytes=needed_at - now):
            self._prefetched.add((node, shard))
            self._fetch(node, shard, missing, now, traffic)
        # The release also declares the next use of a shard that was already resident. If the node had fetched it for
        # another node, no next use was known.
        cache.release(shard, needed_at)

    def _fetch(self, node: int, shard: int, missing: int, now: int, traffic: EpochTraffic) -> None:
        """Count the missing bytes of a node by source. An owner that fetches a shard for another node keeps it."""
        owner = node if self._owners is None else int(self._owners[shard])
        if owner == node:
            traffic.origin_bytes += missing
            return
        if owner >= len(self.caches) or not self.caches[owner].missing(shard):
            traffic.peer_bytes += missing
            return
        # The owner reads the shard from the origin. If the owner has no space, the node itself reads it there.
        cache = self.caches[owner]
        traffic.origin_bytes += missing
        cache.hold(shard)
        if cache.make_resident(shard, now):
            traffic.peer_bytes += missing
        cache.release(shard, UNKNOWN)
