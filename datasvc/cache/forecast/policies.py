"""Simulated caches without data: their resident shards and evictions under three policies. Pure.

No policy evicts a shard in use. `SimulatedCache` applies the policy of the real cache, `eviction.choose_victims`.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence

from datasvc.cache.catalogue.eviction import UNKNOWN, EvictionCandidate, choose_victims
from datasvc.cache.catalogue.quotas import DEFAULT_TENANT, Account
from datasvc.order import NEVER
from datasvc.repository import Digest


class SimulatedCache:
    """A cache that evicts the shard with the furthest next use, like the real cache: policy "furthest".

    Args:
        sizes: bytes of each shard.
        budget_bytes: budget of the cache.
    """

    def __init__(self, sizes: Sequence[int], budget_bytes: int) -> None:
        self._sizes = sizes
        self._budget_bytes = budget_bytes
        self._bytes: dict[int, int] = {}
        self._holds: Counter[int] = Counter()
        self._unheld: list[tuple[int, int]] = []  # (rank, shard) ascending: the last one is evicted first
        self._ranks: dict[int, int] = {}
        self._num_unknown = 0
        self.resident_bytes = 0

    def missing(self, shard: int) -> int:
        """Return the bytes of a shard that are not resident."""
        return self._sizes[shard] - self._bytes.get(shard, 0)

    def hold(self, shard: int) -> None:
        """Add a hold on a shard; its resident bytes are not evicted before `release`."""
        self._holds[shard] += 1
        if shard in self._ranks:
            self._forget_rank(shard)

    def release(self, shard: int, now: int, next_use: int) -> None:
        """Remove a hold, and declare the next use of the shard: a time, UNKNOWN or NEVER."""
        self._holds[shard] -= 1
        if self._holds[shard]:
            return
        del self._holds[shard]
        if shard in self._bytes:
            self._ranks[shard] = self._rank(now, next_use)
            bisect.insort(self._unheld, (self._ranks[shard], shard))

    def make_resident(self, shard: int, now: int, nearest: int = -NEVER) -> bool:
        """Make a shard with a hold completely resident.

        Args:
            shard: number of the shard.
            now: current time. Bytes.
            nearest: distance from `now` up to which shards are spared. Bytes.

        Returns:
            True; False if there is no space, and nothing was changed.
        """
        needed = self.missing(shard)
        victims = self._victims(needed, now, nearest)
        if victims is None:
            return False
        for victim, freed in victims:
            self._evict(victim, freed)
        self._bytes[shard] = self._sizes[shard]
        self.resident_bytes += needed
        return True

    def _rank(self, now: int, next_use: int) -> int:
        """Return the sort key of a shard that is released now: the largest is evicted first."""
        del now
        if next_use < UNKNOWN:
            return next_use
        # Of unknown next uses, the shard released last is evicted first, as in the real cache.
        self._num_unknown += 1
        return next_use + self._num_unknown

    def _victims(self, needed: int, now: int, nearest: int) -> list[tuple[int, int]] | None:
        """Return the shards to evict, and the bytes of each; None if they do not free enough."""
        account = Account(self._budget_bytes, {}, {DEFAULT_TENANT: self.resident_bytes})
        victims = choose_victims(self._candidates(now), account, DEFAULT_TENANT, needed, nearest_bytes=nearest)
        if account.missing(DEFAULT_TENANT, needed) > 0:
            return None
        return [(int(victim.digest), victim.freed_bytes) for victim in victims]

    def _candidates(self, now: int) -> Iterator[EvictionCandidate]:
        for rank, shard in reversed(self._unheld):
            yield EvictionCandidate(Digest(str(shard)), self._bytes[shard], DEFAULT_TENANT, self._distance(rank, now))

    def _distance(self, rank: int, now: int) -> int:
        return rank - now

    def _evict(self, shard: int, freed: int) -> None:
        self.resident_bytes -= freed
        self._bytes[shard] -= freed
        if not self._bytes[shard]:
            del self._bytes[shard]
            self._forget_rank(shard)

    def _forget_rank(self, shard: int) -> None:
        del self._unheld[bisect.bisect_left(self._unheld, (self._ranks.pop(shard), shard))]


class LeastRecentlyUsedCache(SimulatedCache):
    """A cache that evicts the shard released first: policy "lru", for comparison only."""

    def _rank(self, now: int, next_use: int) -> int:
        del next_use
        return -now

    def _distance(self, rank: int, now: int) -> int:
        return now + rank


class OptimalCache(SimulatedCache):
    """A cache that applies Belady's rule to single bytes, so that a shard may stay in part: policy "optimum".

    No other cache has more hits in bytes: all bytes have the same size, and for objects of equal size the rule is
    optimal (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966).
    """

    def _victims(self, needed: int, now: int, nearest: int) -> list[tuple[int, int]] | None:
        assert nearest == -NEVER, "the bound does not apply to a prefetch"
        missing = self.resident_bytes + needed - self._budget_bytes
        victims = []
        for candidate in self._candidates(now):
            if missing <= 0:
                break
            victims.append((int(candidate.digest), min(candidate.freed_bytes, missing)))
            missing -= candidate.freed_bytes
        return None if missing > 0 else victims
