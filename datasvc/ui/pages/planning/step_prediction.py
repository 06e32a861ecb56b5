"""The prediction of steps for the Planner, from the numbers of its form or the costs of a profile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.profiling.predict.cluster import Cluster, Link
from datasvc.trainer.recipes.profiling.predict.costs import Message, StepCosts
from datasvc.trainer.recipes.profiling.predict.limit import Bound, StepLimit, find_limit
from datasvc.trainer.recipes.profiling.predict.predict import Prediction, costs_on, predict
from datasvc.trainer.recipes.profiling.predict.step_time import StepMode
from datasvc.ui.pages.planning.planner_form import PlannerForm


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

    def images_per_second(self, nodes: int) -> float:
        """Return the samples per second of all ranks on `nodes` nodes, with overlapped all-reduces."""
        found = next(each for each in self.predictions if each.cluster.num_nodes == nodes)
        return found.samples_per_s[StepMode.OVERLAPPED]

    def to_dict(self) -> dict[str, Any]:
        """Return the predictions as JSON values."""
        return {
            "limit": self.limit,
            "nodes": [
                {
                    "nodes": each.cluster.num_nodes,
                    "world_size": each.world_size,
                    "step_s": {mode.value: value for mode, value in each.step_s.items()},
                    "samples_per_s": {mode.value: value for mode, value in each.samples_per_s.items()},
                    "efficiency": {mode.value: value for mode, value in each.efficiency.items()},
                }
                for each in self.predictions
            ],
        }


def predict_steps(form: PlannerForm) -> StepPrediction | None:
    """Return the prediction for the form; None if it has no times of a step.

    Raises:
        ConfigError: the costs of the form are not those of a profile, or contradict each other.
    """
    if not form.costs and not (form.forward_ms or form.backward_ms):
        return None
    costs = _parse_costs(form.costs) if form.costs else _costs(form)
    link = Link(form.link_bytes_per_s, form.latency_us / 1e6)
    clusters = [Cluster(number, link, form.gpus) for number in form.node_counts()]
    chosen = Cluster(form.nodes, link, form.gpus)
    on_chosen = costs_on(costs, chosen)
    limit = find_limit(on_chosen)
    step_s = predict(costs, chosen).step_s[StepMode.OVERLAPPED]
    predictions = [predict(costs, cluster) for cluster in clusters]
    return StepPrediction(predictions, str(limit), _describe(limit, on_chosen, step_s))


def _describe(limit: StepLimit, costs: StepCosts, step_s: float) -> str:
    """Return how long a step takes, what limits it, and what would help."""
    device_s = costs.caller_s + costs.transfer_s + costs.compute_s + costs.launch_s + costs.update_s
    reasons = {
        Bound.DATA: f"the loader limits it, which needs {_ms(costs.ahead_s)} for a batch",
        Bound.COMMUNICATION: f"communication limits it: the all-reduces take {_ms(costs.reduce_s)}, longer than the "
        f"{_ms(device_s)} of all other work, so no overlap hides them",
        Bound.PROCESSORS: "the processors limit it: other threads take them from the training thread",
        Bound.COMPUTE: "computation limits it: batches and all-reduces are ready in time",
    }
    return f"A step takes {_ms(step_s)}; {reasons[limit.bound]}. What helps: {limit.advice}."


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def _parse_costs(text: str) -> StepCosts:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"the costs are not JSON: {error}; paste the value of `costs` of `profile --json`"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError("the costs are not a JSON object; paste the value of `costs` of `profile --json`")
    return StepCosts.from_dict(values.get("costs", values))


def _costs(form: PlannerForm) -> StepCosts:
    """Return the costs of a step whose gradients become ready evenly during the backward pass."""
    forward_s, backward_s, loader_s = form.forward_ms / 1e3, form.backward_ms / 1e3, form.loader_ms / 1e3
    messages = tuple(
        Message(int(form.gradients_mb * 1e6 / form.buckets), forward_s + backward_s * number / form.buckets, 0.0)
        for number in range(1, form.buckets + 1)
    )
    return StepCosts(
        io_s=loader_s,
        ahead_s=loader_s,
        caller_s=0.0,
        transfer_s=0.0,
        forward_s=forward_s,
        backward_s=backward_s,
        launch_s=0.0,
        messages=messages,
        skew_s=0.0,
        update_s=form.update_ms / 1e3,
        samples=form.batch,
    )
