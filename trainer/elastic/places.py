"""Who gets which rank in a new round: pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.environment import Place


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A worker that asks for a place.

    Args:
        worker: its name.
        host: where it runs.
        serial: of the state that it has committed; 0 for none, equal serials are equal states.
        old_rank: in the last round in which it was; None for a newcomer.
        seniority: order among newcomers.
    """

    worker: str
    host: str
    serial: int
    old_rank: int | None
    seniority: int


def plan_places(candidates: Sequence[Candidate]) -> dict[str, Place]:
    """Gives every candidate a rank, in rank order.

    Rank 0 is what the others copy from, so the newest state comes first: nothing that any rank has seen
    committed is undone. Among equals the old ranks keep their order, and newcomers come last.
    """
    ordered = sorted(candidates, key=_precedence)
    ranks_on: dict[str, list[str]] = {}
    for candidate in ordered:
        ranks_on.setdefault(candidate.host, []).append(candidate.worker)
    places = {}
    for rank, candidate in enumerate(ordered):
        neighbours = ranks_on[candidate.host]
        local_rank = neighbours.index(candidate.worker)
        # Only nodes that have such a local rank are counted, as in Horovod.
        peers = [host for host, workers in ranks_on.items() if len(workers) > local_rank]
        places[candidate.worker] = Place(
            rank, len(ordered), local_rank, len(neighbours), peers.index(candidate.host), len(peers)
        )
    return places


def _precedence(candidate: Candidate) -> tuple[int, float, int]:
    old_rank = math.inf if candidate.old_rank is None else candidate.old_rank
    return -candidate.serial, old_rank, candidate.seniority
