"""Assignment of ranks to the workers of a new round, for `membership`. All functions are pure.

A worker is a process of the job. A round is a period with a fixed assignment of ranks to workers.
"""

from __future__ import annotations

from collections.abc import Sequence

from datasvc.trainer.elastic.driver.workers import Worker
from datasvc.trainer.env.environment import RankPlacement


def plan_placements(workers: Sequence[Worker]) -> dict[str, RankPlacement]:
    """Return the placement of every worker by its name, in rank order.

    The worker with the newest state gets rank 0. The others copy the state of rank 0, so no committed work is lost.
    Workers with equal states keep the order of their old ranks, and new workers come last. The local rank depends on
    the slot and not on the rank, because programs choose their GPU by the local rank, often before the first round.
    """
    # `serial` is the number of the worker's committed state: the highest one is the newest state.
    ordered = sorted(workers, key=lambda worker: (-worker.serial, *worker.precedence()))
    slots_on: dict[str, list[int]] = {}
    for worker in ordered:
        slots_on.setdefault(worker.host, []).append(worker.slot)
    local_ranks = {host: _plan_local_ranks(slots) for host, slots in slots_on.items()}
    placements = {}
    for rank, worker in enumerate(ordered):
        local_rank_of_slot = local_ranks[worker.host]
        local_rank = local_rank_of_slot[worker.slot]
        # As in Horovod, the cross size counts only the hosts that have this local rank.
        hosts = [host for host, slots in slots_on.items() if len(slots) > local_rank]
        placements[worker.name] = RankPlacement(
            rank=rank,
            size=len(ordered),
            local_rank=local_rank,
            local_size=len(local_rank_of_slot),
            cross_rank=hosts.index(worker.host),
            cross_size=len(hosts),
        )
    return placements


def _plan_local_ranks(slots: Sequence[int]) -> dict[int, int]:
    """Return the local rank of each slot in use on a host.

    A slot whose number is below the number of slots in use gets this number. The other slots get the numbers left.
    """
    unused = sorted(set(range(len(slots))) - set(slots))
    return {slot: slot if slot < len(slots) else unused.pop(0) for slot in sorted(slots)}
