"""What evicts: a pure choice, from what jobs say of their future.

Of all resident objects that nobody holds, the one whose next use is furthest ahead goes first: Belady's rule
(L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966), which the known order makes
possible. Times of different jobs are compared as what each still reads until then, in bytes.

What nobody knows the next use of counts as further than all that is known, and of it what was released last goes
first: where every shard is used once an epoch, that keeps as much of the data as fits (evicting what was released
first would drop each shard just before its next use). What jobs left behind that are gone goes before anything of a
running job, the oldest job first.
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
"""Next uses from here on are not known: they count releases."""


@dataclass(frozen=True)
class EvictionCandidate:
    """A resident object that is not pinned.

    Attributes:
        digest: the object.
        freed_bytes: what evicting it frees.
        tenant: whose it is.
        distance_bytes: what its job still reads before it needs the object again.
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
    nearest_bytes: int = -NEVER,
    take: Callable[[EvictionCandidate], bool] = lambda _: True,
) -> list[EvictionCandidate]:
    """Return what to evict so that `tenant` may use `size_bytes` more, or all that may go where that is not enough.

    Args:
        candidates: first what goes first; read no further than needed.
        account: what is used; afterwards it says what is used, and missing, without the victims.
        tenant: who asks.
        size_bytes: for what.
        nearest_bytes: spare what is needed as soon as that, or sooner: a prefetch does no harm.
        take: returns whether a victim can be had; asked of nothing that would not help.
    """
    victims: list[EvictionCandidate] = []
    waiting = iter(candidates)
    while account.missing(tenant, size_bytes) > 0:
        candidate = next(waiting, None)
        if candidate is None or candidate.distance_bytes <= nearest_bytes:
            break
        if account.helps(candidate.tenant, tenant, candidate.freed_bytes, size_bytes) and take(candidate):
            account.evict(candidate.tenant, candidate.freed_bytes)
            victims.append(candidate)
    return victims


def distance_bytes(next_use: int, clock: int | None) -> int:
    """Return what a job still reads until `next_use` of its clock; None is the clock of a job that is gone."""
    if clock is None:
        return next_use + NEVER  # further than all that anybody still waits for
    # Unknown ones count releases, of all jobs: no clock compares with them.
    return next_use if next_use >= UNKNOWN else next_use - clock


def by_distance(queues: Iterable[Iterator[EvictionCandidate]]) -> Iterator[EvictionCandidate]:
    """Yield the candidates of running jobs, furthest first; each queue is sorted so already."""
    yield from heapq.merge(*queues, key=lambda candidate: -candidate.distance_bytes)
