"""What caches would move if a known sequence of uses ran through them: a simulation, without a byte moved. Pure.

Of several nodes each has a cache. Each shard may have an owner among them, which alone asks the origin for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from datasvc.cache.catalogue.eviction import UNKNOWN
from datasvc.cache.catalogue.next_use import Uses, bias_owned, next_uses
from datasvc.cache.forecast.policies import LeastRecentlyUsedCache, OptimalCache, SimulatedCache
from datasvc.errors import CacheFullError
from datasvc.keyed_random import Integers

Policy = Literal["furthest", "lru", "optimum"]

_CACHES: Final[dict[Policy, type[SimulatedCache]]] = {
    "furthest": SimulatedCache,
    "lru": LeastRecentlyUsedCache,
    "optimum": OptimalCache,
}
_RELEASE, _ACQUIRE, _PREFETCH = 0, 1, 2  # in the order in which they happen at one moment


@dataclass
class EpochTraffic:
    """What one epoch moved, over all nodes. Bytes.

    Attributes:
        used_bytes: of the shards, each once per use.
        hit_bytes: of these, what the cache of the node had.
        origin_bytes: read from the origin.
        peer_bytes: read from other nodes.
        late_bytes: of what was read, what was not asked for before it was needed.
    """

    used_bytes: int = 0
    hit_bytes: int = 0
    origin_bytes: int = 0
    peer_bytes: int = 0
    late_bytes: int = 0

    @property
    def hit_ratio(self) -> float:
        """The share of what was used that the cache had; 1 where nothing was used."""
        return self.hit_bytes / self.used_bytes if self.used_bytes else 1.0


@dataclass(frozen=True)
class Replay:
    """What a replay found.

    Attributes:
        epochs: what each moved.
        resident_bytes: what each node's cache holds at the end.
    """

    epochs: list[EpochTraffic]
    resident_bytes: list[int]


def replay(
    nodes: Sequence[Uses],
    bytes_per_shard: Integers,
    budget_bytes: int,
    *,
    policy: Policy = "furthest",
    ahead_bytes: int = 0,
    owners: Integers | None = None,
    favours_owned: bool = True,
) -> Replay:
    """Run uses through caches that are empty at first, all nodes at one pace.

    Args:
        nodes: the uses of each node, one at least in all. Next uses are seen up to the epoch after a use, by
            "optimum" all of them.
        bytes_per_shard: `int64[num_shards]`.
        budget_bytes: of each node's cache.
        policy: what is evicted: "furthest" as the real cache, "lru" for comparison, "optimum" the bound that no
            cache exceeds.
        ahead_bytes: "furthest" only: fetch what is needed within so much of the clock, where that evicts nothing
            that is needed sooner; 0: fetch when needed.
        owners: `int64[num_shards]`, the node that fetches each shard for all; None: each node for itself. Who is none
            of `nodes` has its shards whenever they are asked for.
        favours_owned: whether nodes keep what they own before what they do not, see `bias_owned`.

    Raises:
        CacheFullError: what is in use at once exceeds the budget.
    """
    assert policy == "furthest" or not ahead_bytes, "only who knows the future can prefetch"
    sizes = bytes_per_shard.tolist()
    cluster = _SimulatedCaches([_CACHES[policy](sizes, budget_bytes) for _ in nodes], sizes, owners)
    again = [next_uses(uses, epochs_ahead=None if policy == "optimum" else 1) for uses in nodes]
    if owners is not None and favours_owned:
        again = [
            bias_owned(each, owners[uses.shards] == node)
            for node, (uses, each) in enumerate(zip(nodes, again, strict=True))
        ]
    numbers = np.concatenate([uses.epochs for uses in nodes])
    first_epoch = int(numbers.min())
    epochs = [EpochTraffic() for _ in range(int(numbers.max()) + 1 - first_epoch)]
    for now, kind, node, use in _events(nodes, ahead_bytes):
        shard = int(nodes[node].shards[use])
        traffic = epochs[int(nodes[node].epochs[use]) - first_epoch]
        if kind == _RELEASE:
            cluster.caches[node].release(shard, now, int(again[node][use]))
        elif kind == _ACQUIRE:
            cluster.acquire(node, shard, now, traffic)
        else:
            cluster.prefetch(node, shard, now, traffic, int(nodes[node].first[use]))
    return Replay(epochs, [cache.resident_bytes for cache in cluster.caches])


def _events(nodes: Sequence[Uses], ahead_bytes: int) -> Iterator[tuple[int, ...]]:
    """Yield time, kind, node and number of a use, in the order in which things happen."""
    columns: list[tuple[Integers, int, int]] = []
    for node, uses in enumerate(nodes):
        columns += [(uses.stop, _RELEASE, node), (uses.first, _ACQUIRE, node)]
        if ahead_bytes:
            columns.append((uses.first - ahead_bytes, _PREFETCH, node))
    times = np.concatenate([column for column, _, _ in columns])
    kinds = np.concatenate([np.full(len(column), kind) for column, kind, _ in columns])
    places = np.concatenate([np.full(len(column), node) for column, _, node in columns])
    numbers = np.concatenate([np.arange(len(column)) for column, _, _ in columns])
    by_time = np.lexsort((places, numbers, kinds, times))
    return zip(*(column[by_time].tolist() for column in (times, kinds, places, numbers)), strict=True)


class _SimulatedCaches:
    """The caches of all nodes, and the ways between them."""

    def __init__(self, caches: Sequence[SimulatedCache], sizes: Sequence[int], owners: Integers | None) -> None:
        self.caches = caches
        self._sizes = sizes
        self._owners = owners
        self._prefetched: set[tuple[int, int]] = set()

    def acquire(self, node: int, shard: int, now: int, traffic: EpochTraffic) -> None:
        cache = self.caches[node]
        cache.hold(shard)
        missing = cache.missing(shard)
        traffic.used_bytes += self._sizes[shard]
        if (node, shard) not in self._prefetched:
            traffic.hit_bytes += self._sizes[shard] - missing
        self._prefetched.discard((node, shard))
        if not missing:
            return
        if not cache.bring(shard, now):
            raise CacheFullError(
                f"at {now} of the job's clock the shards in use leave no {missing} bytes of the budget; raise it, or "
                "use shuffle='windowed' with fewer lanes or smaller blocks"
            )
        traffic.late_bytes += missing
        self._fetch(node, shard, missing, now, traffic)

    def prefetch(self, node: int, shard: int, now: int, traffic: EpochTraffic, needed: int) -> None:
        cache = self.caches[node]
        missing = cache.missing(shard)
        cache.hold(shard)
        if missing and cache.bring(shard, now, nearest=needed - now):
            self._prefetched.add((node, shard))
            self._fetch(node, shard, missing, now, traffic)
        # What is there already, perhaps for a peer, is now known to be needed.
        cache.release(shard, now, needed)

    def _fetch(self, node: int, shard: int, missing: int, now: int, traffic: EpochTraffic) -> None:
        """Count where a node gets bytes that it misses, and let their owner have them on the way."""
        owner = node if self._owners is None else int(self._owners[shard])
        if owner == node:
            traffic.origin_bytes += missing
            return
        if owner >= len(self.caches) or not self.caches[owner].missing(shard):
            traffic.peer_bytes += missing
            return
        cache = self.caches[owner]
        traffic.origin_bytes += missing
        cache.hold(shard)
        if cache.bring(shard, now):
            traffic.peer_bytes += missing
        cache.release(shard, now, UNKNOWN)
