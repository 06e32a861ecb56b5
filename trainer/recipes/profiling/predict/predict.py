"""What a step that was measured here would take on another number of nodes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from datasvc.trainer.recipes.profiling.predict.all_reduce import Cluster, all_reduce_s
from datasvc.trainer.recipes.profiling.predict.costs import StepCosts
from datasvc.trainer.recipes.profiling.predict.step_time import StepMode, step_time

_TARGETS_BYTES: Final = 8  # an int64


@dataclass(frozen=True)
class Prediction:
    """Steps on a cluster.

    Attributes:
        cluster: that they are for.
        world_size: ranks of it.
        step_s: of each mode.
        samples_per_s: of each mode, over all ranks.
        efficiency: of each mode: its step on one rank by its step here.
    """

    cluster: Cluster
    world_size: int
    step_s: dict[StepMode, float]
    samples_per_s: dict[StepMode, float]
    efficiency: dict[StepMode, float]


def predict(costs: StepCosts, cluster: Cluster) -> Prediction:
    """Return what steps take if each rank has the batch, the processors and the loader that it has here."""
    there, alone = costs_on(costs, cluster), costs_alone(costs)
    step_s = {mode: step_time(there, mode) for mode in StepMode}
    return Prediction(
        cluster=cluster,
        world_size=cluster.world_size,
        step_s=step_s,
        samples_per_s={mode: costs.samples * cluster.world_size / seconds for mode, seconds in step_s.items()},
        efficiency={mode: step_time(alone, mode) / seconds for mode, seconds in step_s.items()},
    )


def costs_on(costs: StepCosts, cluster: Cluster) -> StepCosts:
    """Return the costs with the communication of a cluster, all-reduced in the same messages.

    The wait for the slowest rank stays as it was measured, which is too little for many more ranks; `simulate` knows
    better. So does the contention for processors.
    """
    if cluster.world_size == 1:
        return costs_alone(costs)
    messages = tuple(
        dataclasses.replace(message, reduce_s=all_reduce_s(message.size_bytes, cluster)) for message in costs.messages
    )
    targets_s = all_reduce_s(_TARGETS_BYTES, cluster) if costs.targets_s else 0.0
    return dataclasses.replace(costs, messages=messages, targets_s=targets_s)


def costs_alone(costs: StepCosts) -> StepCosts:
    """Return the costs of a rank that has nobody to send to or to wait for."""
    return dataclasses.replace(costs, messages=(), launch_s=0.0, reduce_beside_s=0.0, skew_s=0.0, targets_s=0.0)
