"""What evicts: a pure choice.

Every shard is used once an epoch, so no policy beats the share of the data that fits. Evicting what was released
*last* reaches it: the shards that arrived first stay for good, and the rest stream through the space of the newest.
Evicting what was released first (LRU) would drop each shard just before its next use.
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
    """

    digest: Digest
    size_bytes: int
    released: int


def choose_victims(candidates: Iterable[Candidate], needed_bytes: int) -> list[Candidate] | None:
    """Return what to evict so that at least `needed_bytes` are freed; None when all would not be enough."""
    victims = []
    for candidate in sorted(candidates, key=lambda each: (-each.released, each.digest)):
        if needed_bytes <= 0:
            break
        victims.append(candidate)
        needed_bytes -= candidate.size_bytes
    return victims if needed_bytes <= 0 else None
