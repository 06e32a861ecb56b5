"""The form of the Planner: its fields, their values from the address of the page, and what they describe."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Final, Literal

from datasvc.errors import ConfigError
from datasvc.planning.cache import Rates
from datasvc.planning.cluster import Cluster, Link
from datasvc.planning.prediction import StepPrediction, predict_steps
from datasvc.planning.run_plan import PlanOptions
from datasvc.planning.step import Message, StepCosts
from datasvc.ui.web.page import Query

MAX_NODES: Final = 64
_GBIT_BYTES: Final = 1e9 / 8
_MAX_COSTS_CHARS: Final = 6000
_MAX_EPOCHS: Final = 1_000_000


@dataclass(frozen=True, kw_only=True)
class PlannerForm:
    """The settings of the page; the address has those that differ.

    Attributes:
        data: data set or version; "" for the first one.
        split: name of the split; "" for train, or the first one.
        nodes: number of nodes.
        gpus: GPUs, and so ranks, of each node.
        budget: budget of a node's cache in percent of the data.
        shuffle: shuffle of the loader.
        lanes: lanes of a windowed order. With one lane and block 0, lanes and block are those that a loader derives.
        block: power of two of the samples of a block; 0: none.
        link: bandwidth of a node in Gbit/s, for peers and for all-reduces.
        origin: bandwidth of the origin for all nodes together in Gbit/s; 0: unknown.
        batch: samples of a rank's batch.
        peers: whether nodes read from each other.
        epochs: epochs of the run, for its cost; 0: unknown.
        images_per_second: samples that a node trains per second; 0: from the prediction, or unknown.
        forward_ms: forward pass of a step; 0, with `backward_ms`: steps are not predicted.
        backward_ms: backward pass.
        loader_ms: time of the loader for a batch, with prefetching.
        update_ms: optimizer's step.
        gradients_mb: size of the gradients in MB.
        buckets: number of messages in which they are reduced.
        latency_us: latency of a message between nodes.
        costs: costs of a step from a profile, as JSON; they replace the numbers of steps above. "" for none.
    """

    data: str = ""
    split: str = ""
    nodes: int = 4
    gpus: int = 1
    budget: int = 120
    shuffle: Literal["windowed", "global", "none"] = "windowed"
    lanes: int = 1
    block: int = 0
    link: int = 10
    origin: int = 0
    batch: int = 256
    peers: bool = True
    epochs: int = 0
    images_per_second: float = 0.0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    loader_ms: float = 0.0
    update_ms: float = 0.0
    gradients_mb: float = 0.0
    buckets: int = 8
    latency_us: float = 50.0
    costs: str = ""

    @classmethod
    def parse(cls, query: Query) -> PlannerForm:
        """Return the form from the parameters of the page. Raise ConfigError if one is not valid."""
        values: dict[str, Any] = {name: query.text(name) or "" for name in ("data", "split", "costs")}
        if len(values["costs"]) > _MAX_COSTS_CHARS:
            raise ConfigError(f"the costs of a step have more than {_MAX_COSTS_CHARS} characters; use fewer messages")
        for name, (_, low, high, _) in SLIDERS.items():
            values[name] = query.number(name, getattr(cls, name), low=low, high=high)
        values["batch"] = query.number("batch", cls.batch, low=1, high=1 << 20)
        values["epochs"] = query.number("epochs", cls.epochs, high=_MAX_EPOCHS)
        values["buckets"] = query.number("buckets", cls.buckets, low=1, high=1000)
        for name in NUMBERS:
            values[name] = _positive(query, name, getattr(cls, name))
        values["shuffle"] = query.choice("shuffle", ("windowed", "global", "none"))
        values["peers"] = query.choice("peers", ("yes", "no")) == "yes"
        return cls(**values)

    def plan_options(
        self, *, data_bytes: int, images_per_second: float | None = None, nodes: int | None = None
    ) -> PlanOptions:
        """Return the options of the forecast.

        Args:
            data_bytes: size of the split.
            images_per_second: samples that a node trains per second; None: unknown.
            nodes: number of nodes; None: that of the form.
        """
        is_windowed, nodes = self.shuffle == "windowed", nodes or self.nodes
        return PlanOptions(
            budget_bytes=max(1, data_bytes * self.budget // 100),
            nodes=nodes,
            shuffle=self.shuffle,
            lanes=self.lanes if is_windowed else 1,
            block=1 << self.block if is_windowed and self.block else None,
            batch_size=self.batch,
            ranks_per_node=self.gpus,
            peers=self.peers,
            rates=Rates(
                images_per_second,
                self.origin * _GBIT_BYTES if self.origin else None,
                self.link * _GBIT_BYTES if self.peers and nodes > 1 else None,
            ),
        )

    def node_counts(self) -> list[int]:
        """Return the numbers of nodes of the curves: powers of two up to at least twice the chosen number."""
        largest = min(MAX_NODES, 2 * self.nodes)
        powers = [1 << power for power in range(math.ceil(math.log2(largest)) + 1)]
        return sorted({*powers, self.nodes})

    def predict_steps(self) -> StepPrediction | None:
        """Return the prediction of steps; None if the form has no times of a step.

        Raises:
            ConfigError: the costs of the form are not those of a profile, or contradict each other.
        """
        if not self.costs and not (self.forward_ms or self.backward_ms):
            return None
        costs = _parse_costs(self.costs) if self.costs else self._step_costs()
        cluster = Cluster(self.nodes, Link(self.link * _GBIT_BYTES, self.latency_us / 1e6), self.gpus)
        return predict_steps(costs, cluster, self.node_counts())

    def _step_costs(self) -> StepCosts:
        """Return the costs of a step whose gradients become ready evenly during the backward pass."""
        forward_s, backward_s, loader_s = self.forward_ms / 1e3, self.backward_ms / 1e3, self.loader_ms / 1e3
        messages = tuple(
            Message(int(self.gradients_mb * 1e6 / self.buckets), forward_s + backward_s * number / self.buckets, 0.0)
            for number in range(1, self.buckets + 1)
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
            update_s=self.update_ms / 1e3,
            samples=self.batch,
        )


SLIDERS: Final = {
    # Each: label, lowest, highest, unit of the value.
    "nodes": ("Nodes", 1, MAX_NODES, ""),
    "gpus": ("GPUs per node", 1, 16, ""),
    "budget": ("Budget of a node's cache", 1, 150, "% of the data"),
    "lanes": ("Lanes", 1, 64, ""),
    "block": ("Block", 0, 20, "2 to this power of samples (0: derived)"),
    "link": ("Link of a node", 1, 400, "Gbit/s"),
    "origin": ("Origin, all nodes together", 0, 400, "Gbit/s (0: unknown)"),
}
NUMBERS: Final = {
    "images_per_second": "Samples per second of a node",
    "forward_ms": "Forward pass, ms",
    "backward_ms": "Backward pass, ms",
    "loader_ms": "Loader per batch, ms",
    "update_ms": "Optimizer's step, ms",
    "gradients_mb": "Gradients, MB",
    "latency_us": "Latency between nodes, microseconds",
}


def _positive(query: Query, name: str, default: float) -> float:
    text = query.text(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e12:
        raise ConfigError(f"{name}={text[:40]!r} is not valid; expected a number, not below 0")
    return value


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
