"""What evicts: a pure choice.

Every shard is used once an epoch, so no policy beats the share of the data that fits. Evicting what was released
*last* reaches it: the shards that arrived first stay for good, and the rest stream through the space of the newest.
Evicting what was released first (LRU) would drop each shard just before its next use.

What jobs left behind that are gone goes before anything of a running job, the oldest first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from datasvc.repository import Digest


@dataclass(frozen=True)
class Candidate:
    """A resident object that nobody holds.

    Attributes:
        digest: the object.
        size_bytes: what evicting it frees.
        released: sequence number of its last release.
        is_stale: whether the process that released it last is gone.
    """

    digest: Digest
    size_bytes: int
    released: int
    is_stale: bool = False


def choose_victims(candidates: Iterable[Candidate], needed_bytes: int) -> list[Candidate] | None:
    """Return what to evict so that at least `needed_bytes` are freed; None when all would not be enough."""
    victims = []
    for candidate in sorted(candidates, key=_keeping_value):
        if needed_bytes <= 0:
            break
        victims.append(candidate)
        needed_bytes -= candidate.size_bytes
    return victims if needed_bytes <= 0 else None


def _keeping_value(candidate: Candidate) -> tuple[bool, int, Digest]:
    by_age = candidate.released if candidate.is_stale else -candidate.released
    return not candidate.is_stale, by_age, candidate.digest
