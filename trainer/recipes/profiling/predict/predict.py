"""Predicts the time of a measured step on another number of nodes."""

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
    """Predicted steps on a cluster.

    Attributes:
        cluster: of the prediction.
        world_size: its number of ranks.
        step_s: by mode.
        samples_per_s: by mode, over all ranks.
        efficiency: by mode: time of a step on one rank divided by its time here.
    """

    cluster: Cluster
    world_size: int
    step_s: dict[StepMode, float]
    samples_per_s: dict[StepMode, float]
    efficiency: dict[StepMode, float]


def predict(costs: StepCosts, cluster: Cluster) -> Prediction:
    """Predict steps on a cluster whose ranks have the measured batch size, processors and loader each."""
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
    """Return the costs with the communication of a cluster, with the same messages.

    The wait for the slowest rank and the contention for processors stay as measured. For many more ranks that wait is
    too short; `simulate` models it.
    """
    if cluster.world_size == 1:
        return costs_alone(costs)
    messages = tuple(
        dataclasses.replace(message, reduce_s=all_reduce_s(message.size_bytes, cluster)) for message in costs.messages
    )
    targets_s = all_reduce_s(_TARGETS_BYTES, cluster) if costs.targets_s else 0.0
    return dataclasses.replace(costs, messages=messages, targets_s=targets_s)


def costs_alone(costs: StepCosts) -> StepCosts:
    """Return the costs of a single rank, without communication."""
    return dataclasses.replace(costs, messages=(), launch_s=0.0, reduce_beside_s=0.0, skew_s=0.0, targets_s=0.0)
