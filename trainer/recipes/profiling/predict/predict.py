"""Predicts the time of a measured step on another cluster, from the time that all-reduces would take there.

`profile --nodes` prints the predictions; `simulate` uses the same costs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from datasvc.trainer.recipes.profiling.predict.cluster import Cluster, Link
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
    messages = tuple(
        dataclasses.replace(message, reduce_s=all_reduce_s(message.size_bytes, cluster)) for message in costs.messages
    )
    # Targets are summed only if their numbers may differ between ranks, which does not depend on the cluster.
    targets_s = all_reduce_s(_TARGETS_BYTES, cluster) if costs.targets_s else 0.0
    return dataclasses.replace(costs, messages=messages, targets_s=targets_s)


def costs_alone(costs: StepCosts) -> StepCosts:
    """Return the costs of a single rank, without communication."""
    return dataclasses.replace(costs, messages=(), launch_s=0.0, reduce_beside_s=0.0, skew_s=0.0, targets_s=0.0)


def all_reduce_s(size_bytes: int, cluster: Cluster) -> float:
    """Return the seconds of one all-reduce over all ranks of a cluster without other traffic; 0 for one rank.

    Without `cluster.inside`, the all-reduce is one ring over all ranks. With it, the all-reduce is hierarchical:
    reduce-scatter in each node, then a ring between the nodes for each part, then all-gather in each node.
    """
    if cluster.world_size == 1:
        return 0.0
    if cluster.inside is None:
        return cluster.message_s + ring_s(size_bytes, cluster.world_size, cluster.network)
    # Each rank of a node sends its part through its own ring over the nodes. All these rings share the network link
    # of the node, so together they take as long as one ring with all bytes.
    within_s = ring_s(size_bytes, cluster.ranks_per_node, cluster.inside)
    return cluster.message_s + within_s + ring_s(size_bytes, cluster.num_nodes, cluster.network)


def ring_s(size_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds of a ring all-reduce: 2 (N - 1) / N * bytes / bandwidth + 2 (N - 1) * latency.

    It is a reduce-scatter and an all-gather of N - 1 messages each. A message is one N-th of the bytes (Patarasuk
    and Yuan 2009).
    """
    num_messages = 2 * (num_ranks - 1)
    return num_messages / num_ranks * size_bytes / link.bytes_per_s + num_messages * link.latency_s
