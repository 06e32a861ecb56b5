"""Eviction policy: a pure function of the next uses that jobs have declared.

The cache (`space`) and its simulation (`datasvc.planning`) use the same policy.

Of all resident objects that are not in use, the one with the furthest next use is evicted first. This is Belady's
rule (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966); it is possible because
access orders are known. A next use is the time when a job needs the object again, on the job's clock of bytes served.
Next uses of different jobs are compared by distance: the bytes that a job still reads before it needs the object.

An unknown next use counts as further than every known one. Of the objects with an unknown next use, the one released
last is evicted first. If every shard is used once per epoch, this keeps as much of the data as fits; evicting the one
released first would drop each shard just before its next use. Objects of ended jobs are evicted before those of
running jobs; of two ended jobs, the older one loses its objects first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from datasvc.cache.catalogue.quotas import Account
from datasvc.order import NEVER
from datasvc.repository import Digest

UNKNOWN: Final = 1 << 60
"""Smallest unknown next use. Each unknown next use is UNKNOWN plus a number that grows with each release."""


@dataclass(frozen=True)
class EvictionCandidate:
    """A resident object that is not pinned.

    Attributes:
        freed_bytes: disk space that its eviction frees.
        tenant: tenant that is charged for it.
        distance_bytes: distance of its next use, see the function `distance_bytes`.
    """

    digest: Digest
    freed_bytes: int
    tenant: str
    distance_bytes: int


def choose_victims(
    candidates: Iterable[EvictionCandidate],
    account: Account,
    tenant: str,
    size_bytes: int,
    *,
    min_distance_bytes: int = -NEVER,
    take: Callable[[EvictionCandidate], bool] = lambda _: True,
) -> list[EvictionCandidate]:
    """Return the objects to evict so that `tenant` may use `size_bytes` more.

    If this is impossible, return all objects that may be evicted; `account.missing` (bytes needed) is then above 0.

    Args:
        candidates: objects in the order of eviction; iterated no further than needed.
        account: space in use; this function subtracts the victims from it.
        tenant: tenant that needs the space.
        size_bytes: space that it needs.
        min_distance_bytes: evict only objects at a larger distance. A prefetch sets it to keep the objects that are
            needed before its own; -NEVER is below every distance.
        take: locks a candidate, and returns whether this succeeded; called only for objects whose eviction helps.
    """
    victims: list[EvictionCandidate] = []
    remaining = iter(candidates)
    while account.missing(tenant, size_bytes) > 0:
        candidate = next(remaining, None)
        # Candidates of ended jobs come first, and count as further than all others. Those of running jobs follow by
        # descending distance. So no later candidate may be evicted either.
        if candidate is None or candidate.distance_bytes <= min_distance_bytes:
            break
        if account.helps(candidate.tenant, tenant, candidate.freed_bytes, size_bytes) and take(candidate):
            account.evict(candidate.tenant, candidate.freed_bytes)
            victims.append(candidate)
    return victims


def distance_bytes(next_use: int, clock: int | None) -> int:
    """Return the bytes that a job still reads before `next_use` on its clock; `clock` is None for an ended job."""
    if clock is None:
        return next_use + NEVER  # further than every object of a running job
    # An unknown next use is not a time on the job's clock: it contains a count of the releases of all jobs.
    return next_use if next_use >= UNKNOWN else next_use - clock


def by_distance(queues: Iterable[Iterator[EvictionCandidate]]) -> Iterator[EvictionCandidate]:
    """Merge the candidates of running jobs, the furthest first. Each queue, one per job, must be in this order."""
    yield from heapq.merge(*queues, key=lambda candidate: -candidate.distance_bytes)
