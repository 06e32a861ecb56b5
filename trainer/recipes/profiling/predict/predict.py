"""Predicts the time of a measured step on another cluster, from the time that all-reduces would take there.

`profile --nodes` prints the predictions; `simulate` uses the same costs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from datasvc.trainer.recipes.profiling.predict.cluster import Cluster
from datasvc.trainer.recipes.profiling.predict.collectives import all_ranks, all_reduce_s
from datasvc.trainer.recipes.profiling.predict.costs import StepCosts
from datasvc.trainer.recipes.profiling.predict.step_time import StepMode, step_time

_TARGETS_BYTES: Final = 8  # an int64


@dataclass(frozen=True)
class Prediction:
    """Predicted steps on a cluster, by mode.

    Attributes:
        cluster: cluster of the prediction.
        world_size: number of its ranks.
        step_s: duration of a step.
        samples_per_s: samples of all ranks per second.
        efficiency: duration of a step on a single rank, divided by `step_s`.
    """

    cluster: Cluster
    world_size: int
    step_s: dict[StepMode, float]
    samples_per_s: dict[StepMode, float]
    efficiency: dict[StepMode, float]


def predict(costs: StepCosts, cluster: Cluster) -> Prediction:
    """Predict steps on a cluster. Its ranks are assumed to have the measured batch size, processors and loader."""
    predicted, alone = costs_on(costs, cluster), costs_alone(costs)
    step_s = {mode: step_time(predicted, mode) for mode in StepMode}
    return Prediction(
        cluster=cluster,
        world_size=cluster.world_size,
        step_s=step_s,
        samples_per_s={mode: costs.samples * cluster.world_size / seconds for mode, seconds in step_s.items()},
        efficiency={mode: step_time(alone, mode) / seconds for mode, seconds in step_s.items()},
    )


def costs_on(costs: StepCosts, cluster: Cluster) -> StepCosts:
    """Return the costs of the same messages and computation, with the all-reduce times of a cluster.

    The wait for the slowest rank and the contention for processors stay as measured. With many more ranks the real
    wait is longer; `simulate` models it.
    """
    if cluster.world_size == 1:
        return costs_alone(costs)
    ranks = all_ranks(cluster)
    messages = tuple(
        dataclasses.replace(message, reduce_s=all_reduce_s(message.size_bytes, ranks, cluster))
        for message in costs.messages
    )
    # Targets are summed only if their numbers may differ between ranks, which does not depend on the cluster.
    targets_s = all_reduce_s(_TARGETS_BYTES, ranks, cluster) if costs.targets_s else 0.0
    return dataclasses.replace(costs, messages=messages, targets_s=targets_s)


def costs_alone(costs: StepCosts) -> StepCosts:
    """Return the costs of a single rank, without communication."""
    return dataclasses.replace(costs, messages=(), launch_s=0.0, reduce_beside_s=0.0, skew_s=0.0, targets_s=0.0)
