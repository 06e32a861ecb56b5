"""Predicts the time of a measured step on another cluster, and the resource that limits it.

Only the all-reduces are replaced by those of the cluster. `profile` prints the predictions, and the limit as its
last line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from datasvc.planning.cluster import Cluster, all_ranks, all_reduce_s
from datasvc.planning.step import StepCosts, StepMode, contention_s, exposed_reduce_s, step_time, training_side_s

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
    wait is longer; `tools/simulate_training.py` models it.
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


# If the training thread loses more than this share of its time to concurrent threads, the processors are the limit.
_MAX_CONTENTION: Final = 0.2


class Bound(StrEnum):
    """A limiting resource."""

    DATA = "data"
    COMPUTE = "compute"
    COMMUNICATION = "communication"
    PROCESSORS = "processors"


@dataclass(frozen=True)
class StepLimit:
    """The limit of a run in the mode "overlapped": with prefetching, and with all-reduces during the backward pass.

    Attributes:
        bound: the limiting resource.
        inequality: the comparison of times that decided, in milliseconds.
        advice: how to raise the limit.
    """

    bound: Bound
    inequality: str
    advice: str

    def __str__(self) -> str:
        return f"{self.bound}-bound: {self.inequality}; {self.advice}"


def find_limit(costs: StepCosts) -> StepLimit:
    """Return the resource that limits training, by the first of these conditions that holds.

    The module `step` defines the symbols.

    - Data: t_a > t_i + t_h2d + t_f + t_b + t_l + t_u + t_n + t_c^no + t_w + t_k. The loader needs more time for a
      batch than the training thread needs for a step.
    - Communication: t_c > t_i + t_h2d + t_f + t_b + t_l + t_u. The all-reduces take longer than the work of the
      training thread, so even a perfect overlap cannot hide them.
    - Processors: t_k, the time lost to concurrent threads, is more than a fifth of the training thread's time.
    - Computation: otherwise.
    """
    training_s, lost_s = training_side_s(costs, StepMode.OVERLAPPED), contention_s(costs, StepMode.OVERLAPPED)
    device = _format_sum(
        t_i=costs.caller_s,
        t_h2d=costs.transfer_s,
        t_f=costs.forward_s,
        t_b=costs.backward_s,
        t_l=costs.launch_s,
        t_u=costs.update_s,
    )
    # Show t_n only for tasks that sum their targets.
    targets = {"t_n": costs.targets_s} if costs.targets_s else {}
    exposed = _format_sum(**targets, **{"t_c^no": exposed_reduce_s(costs)}, t_w=costs.skew_s, t_k=lost_s)
    training = f"{device} + {exposed} = {training_s * 1e3:.2f} ms"
    ahead, reduce = _format_sum(t_a=costs.ahead_s), _format_sum(t_c=costs.reduce_s)
    # Check data first, because nothing else limits training as long as it waits for batches.
    if costs.ahead_s > training_s:
        advice = "run the training with --profile to find the slow stage of the loader"
        return StepLimit(Bound.DATA, f"{ahead} > {training}", advice)
    if costs.reduce_s > costs.device_s:
        advice = "larger batches, compression, or faster links"
        return StepLimit(Bound.COMMUNICATION, f"{reduce} > {device} = {costs.device_s * 1e3:.2f} ms; {ahead}", advice)
    if lost_s > _MAX_CONTENTION * training_s:
        inequality = f"{_format_sum(t_k=lost_s)} > {_MAX_CONTENTION:.0%} of {training}; {ahead}"
        return StepLimit(Bound.PROCESSORS, inequality, "more processors, or decoding on the GPU")
    return StepLimit(Bound.COMPUTE, f"{training} >= {ahead}, {reduce}", "mixed precision, or more ranks")


def _format_sum(**terms_s: float) -> str:
    """Return a sum with symbols, in milliseconds: "t_f 12.00 + t_b 24.00"."""
    return " + ".join(f"{symbol} {seconds * 1e3:.2f}" for symbol, seconds in terms_s.items())


@dataclass(frozen=True)
class StepPrediction:
    """Predicted steps on clusters of several sizes.

    Attributes:
        predictions: by number of nodes, ascending.
        limit: what limits the steps on the chosen cluster, as a profile prints it.
        words: the same in a sentence.
    """

    predictions: Sequence[Prediction]
    limit: str
    words: str

    def samples_per_s(self, num_nodes: int) -> float:
        """Return the samples per second of all ranks on `num_nodes` nodes, with overlapped all-reduces."""
        found = next(each for each in self.predictions if each.cluster.num_nodes == num_nodes)
        return found.samples_per_s[StepMode.OVERLAPPED]

    def to_dict(self) -> dict[str, Any]:
        """Return the predictions as JSON values."""
        rows = [dataclasses.asdict(each) for each in self.predictions]
        return {"limit": self.limit, "nodes": [{"nodes": row.pop("cluster")["num_nodes"], **row} for row in rows]}


def predict_steps(costs: StepCosts, cluster: Cluster, node_counts: Iterable[int]) -> StepPrediction:
    """Predict steps on a cluster, and on clusters of such nodes of other sizes."""
    on_cluster = costs_on(costs, cluster)
    limit = find_limit(on_cluster)
    predictions = [predict(costs, dataclasses.replace(cluster, num_nodes=number)) for number in node_counts]
    step_s = step_time(on_cluster, StepMode.OVERLAPPED)
    return StepPrediction(predictions, str(limit), _describe(limit, on_cluster, step_s))


def _describe(limit: StepLimit, costs: StepCosts, step_s: float) -> str:
    """Return how long a step takes, what limits it, and what would help."""
    reasons = {
        Bound.DATA: f"the loader limits it, which needs {_ms(costs.ahead_s)} for a batch",
        Bound.COMMUNICATION: f"communication limits it: the all-reduces take {_ms(costs.reduce_s)}, longer than the "
        f"{_ms(costs.device_s)} of all other work, so no overlap hides them",
        Bound.PROCESSORS: "the processors limit it: other threads take them from the training thread",
        Bound.COMPUTE: "computation limits it: batches and all-reduces are ready in time",
    }
    return f"A step takes {_ms(step_s)}; {reasons[limit.bound]}. What helps: {limit.advice}."


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
