"""A simulated cache: its resident shards and evictions, by the policy of the real cache. It has no data.

`replay` creates one for each node.
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
