"""Who gets which rank in a new round: pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from datasvc.trainer.env.environment import RankPlacement


@dataclass(frozen=True, kw_only=True)
class RankCandidate:
    """A worker that asks for a place.

    Args:
        worker: its name.
        host: where it runs.
        slot: its number among the host's slots, from 0; no two candidates of a host have the same.
        serial: of the state that it has committed; 0 for none, equal serials are equal states.
        old_rank: in the last round in which it was; None for a newcomer.
        seniority: order among newcomers.
    """

    worker: str
    host: str
    slot: int
    serial: int
    old_rank: int | None
    seniority: int


def plan_places(candidates: Sequence[RankCandidate]) -> dict[str, RankPlacement]:
    """Gives every candidate a rank, in rank order.

    Rank 0 is what the others copy from, so the newest state comes first: nothing that any rank has seen
    committed is undone. Among equals the old ranks keep their order, and newcomers come last. The local rank follows
    from the slot, not from the rank: programs choose their GPU by it, often before the first round.
    """
    ordered = sorted(candidates, key=_precedence)
    slots_on: dict[str, list[int]] = {}
    for candidate in ordered:
        slots_on.setdefault(candidate.host, []).append(candidate.slot)
    local_ranks = {host: _plan_local_ranks(slots) for host, slots in slots_on.items()}
    places = {}
    for rank, candidate in enumerate(ordered):
        neighbours = local_ranks[candidate.host]
        local_rank = neighbours[candidate.slot]
        # Only nodes that have such a local rank are counted, as in Horovod.
        peers = [host for host, slots in slots_on.items() if len(slots) > local_rank]
        places[candidate.worker] = RankPlacement(
            rank, len(ordered), local_rank, len(neighbours), peers.index(candidate.host), len(peers)
        )
    return places


def _plan_local_ranks(slots: Sequence[int]) -> dict[int, int]:
    """The local rank of each slot: the slot itself where there are enough neighbours, else a number left free."""
    free = sorted(set(range(len(slots))) - set(slots))
    return {slot: slot if slot < len(slots) else free.pop(0) for slot in sorted(slots)}


def _precedence(candidate: RankCandidate) -> tuple[int, float, int]:
    old_rank = math.inf if candidate.old_rank is None else candidate.old_rank
    return -candidate.serial, old_rank, candidate.seniority
