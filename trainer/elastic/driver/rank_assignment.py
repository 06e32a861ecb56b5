"""Assignment of ranks to the workers of a new round, for `membership`. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from datasvc.trainer.elastic.driver.workers import Worker
from datasvc.trainer.env.environment import RankPlacement


def plan_placements(workers: Sequence[Worker]) -> dict[str, RankPlacement]:
    """Return the placement of every worker by its name, in rank order.

    The worker with the newest state gets rank 0: the others copy the state of rank 0, so no committed work is lost.
    Workers with equal states keep the order of their old ranks, and new workers come last. The local rank depends on
    the slot and not on the rank, because programs choose their GPU by the local rank, often before the first round.
    """
    ordered = sorted(workers, key=lambda worker: (-worker.serial, *worker.precedence()))
    slots_on: dict[str, list[int]] = {}
    for worker in ordered:
        slots_on.setdefault(worker.host, []).append(worker.slot)
    local_ranks = {host: _plan_local_ranks(slots) for host, slots in slots_on.items()}
    placements = {}
    for rank, worker in enumerate(ordered):
        neighbours = local_ranks[worker.host]
        local_rank = neighbours[worker.slot]
        # As in Horovod, the cross size counts only nodes that have this local rank.
        peers = [host for host, slots in slots_on.items() if len(slots) > local_rank]
        placements[worker.name] = RankPlacement(
            rank, len(ordered), local_rank, len(neighbours), peers.index(worker.host), len(peers)
        )
    return placements


def _plan_local_ranks(slots: Sequence[int]) -> dict[int, int]:
    """Return the local rank of each slot: its own number if that is below the number of slots, else an unused one."""
    free = sorted(set(range(len(slots))) - set(slots))
    return {slot: slot if slot < len(slots) else free.pop(0) for slot in sorted(slots)}
