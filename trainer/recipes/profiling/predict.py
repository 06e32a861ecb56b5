"""What a step that was measured here would take on another number of nodes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from trainer.recipes.profiling.all_reduce import Cluster, all_reduce_s
from trainer.recipes.profiling.costs import StepCosts
from trainer.recipes.profiling.step_time import Mode, step_time


@dataclass(frozen=True)
class Prediction:
    """Steps on a cluster.

    Attributes:
        ranks: of all nodes.
        step_s: of each mode.
        samples_per_s: of each mode, over all ranks.
        efficiency: of each mode: its step on one rank by its step here.
    """

    ranks: int
    step_s: dict[Mode, float]
    samples_per_s: dict[Mode, float]
    efficiency: dict[Mode, float]


def predict(costs: StepCosts, cluster: Cluster) -> Prediction:
    """Return what steps take if each rank has the batch, the processors and the loader that it has here."""
    there, alone = costs_on(costs, cluster), dataclasses.replace(costs, messages=(), skew_s=0.0)
    step_s = {mode: step_time(there, mode) for mode in Mode}
    return Prediction(
        ranks=cluster.ranks,
        step_s=step_s,
        samples_per_s={mode: costs.samples * cluster.ranks / seconds for mode, seconds in step_s.items()},
        efficiency={mode: step_time(alone, mode) / seconds for mode, seconds in step_s.items()},
    )


def costs_on(costs: StepCosts, cluster: Cluster) -> StepCosts:
    """Return the costs with the communication of a cluster, all-reduced in the same messages.

    The wait for the slowest rank stays as it was measured, which is too little for many more ranks; `simulate` knows
    better. So does the contention for processors.
    """
    if cluster.ranks == 1:
        return dataclasses.replace(costs, messages=(), skew_s=0.0)
    messages = tuple(
        dataclasses.replace(message, reduce_s=all_reduce_s(message.size_bytes, cluster)) for message in costs.messages
    )
    return dataclasses.replace(costs, messages=messages)
