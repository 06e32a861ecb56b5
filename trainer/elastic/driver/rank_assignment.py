"""Assignment of ranks to the workers of a new round. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from datasvc.trainer.env.environment import RankPlacement


@dataclass(frozen=True, kw_only=True)
class RankCandidate:
    """A worker that requests a rank.

    Args:
        worker: name of the worker.
        host: name of its host.
        slot: number of its slot on the host, from 0; unique among the candidates of a host.
        serial: serial number of its committed state; 0 for none. Equal serials mean equal states.
        old_rank: rank in its last round; None for a new worker.
        seniority: order among new workers.
    """

    worker: str
    host: str
    slot: int
    serial: int
    old_rank: int | None
    seniority: int


def plan_placements(candidates: Sequence[RankCandidate]) -> dict[str, RankPlacement]:
    """Return the placement of every candidate by its name, in rank order.

    The candidate with the newest state gets rank 0, because the others copy its state: no committed work is lost.
    With equal states, old ranks keep their order, and new workers come last. The local rank depends on the slot, not
    on the
    rank: programs choose their GPU by it, often before the first round.
    """
    ordered = sorted(candidates, key=_precedence)
    slots_on: dict[str, list[int]] = {}
    for candidate in ordered:
        slots_on.setdefault(candidate.host, []).append(candidate.slot)
    local_ranks = {host: _plan_local_ranks(slots) for host, slots in slots_on.items()}
    placements = {}
    for rank, candidate in enumerate(ordered):
        neighbours = local_ranks[candidate.host]
        local_rank = neighbours[candidate.slot]
        # As in Horovod, the cross size counts only nodes that have this local rank.
        peers = [host for host, slots in slots_on.items() if len(slots) > local_rank]
        placements[candidate.worker] = RankPlacement(
            rank, len(ordered), local_rank, len(neighbours), peers.index(candidate.host), len(peers)
        )
    return placements


def _plan_local_ranks(slots: Sequence[int]) -> dict[int, int]:
    """Return the local rank of each slot: its own number if that is below the number of slots, else an unused one."""
    free = sorted(set(range(len(slots))) - set(slots))
    return {slot: slot if slot < len(slots) else free.pop(0) for slot in sorted(slots)}


def _precedence(candidate: RankCandidate) -> tuple[int, float, int]:
    old_rank = math.inf if candidate.old_rank is None else candidate.old_rank
    return -candidate.serial, old_rank, candidate.seniority
