"""Exponential moving average of a run's weights. A run saves and evaluates both the weights and their average."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.layouts.shard import to_local


class WeightAverage:
    """Averages a model's weights: `average = decay * average + (1 - decay) * weights` after each step.

    After n updates the decay is `min(decay, (1 + n) / (10 + n))`. Buffers, such as the statistics of batch
    normalisation, are not averaged.

    Args:
        model: its parameters are averaged; the average starts as a copy of them.
        decay: weight of the previous average, 0 <= decay < 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._num_updates = 0
        self._weights = dict(model.named_parameters())
        self._averages = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Set the average to the current weights and the number of updates to 0."""
        self._num_updates = 0
        for name, weight in self._weights.items():
            self._averages[name].copy_(weight)

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the average; call this after each step."""
        self._num_updates += 1
        # The decay is smaller at first. Otherwise the initial weights would dominate the average of a short run.
        decay = min(self._decay, (1 + self._num_updates) / (10 + self._num_updates))
        averages, weights = (list(map(to_local, tensors.values())) for tensors in (self._averages, self._weights))
        torch._foreach_lerp_(averages, weights, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Exchange the weights for their average inside the context; do not train inside it."""
        # Exchange the values in place, because the optimizer and a compiled model hold references to the tensors.
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, weight in self._weights.items():
            trained = weight.detach().clone()
            weight.copy_(self._averages[name])
            self._averages[name].copy_(trained)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages (not copied) and the number of updates as a state tree, a nested dict."""
        return {"num_updates": self._num_updates, "averages": dict(self._averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned.

        Raises:
            ConfigError: the state has other names or shapes than this model.
        """
        saved_shapes = {name: tuple(average.shape) for name, average in state["averages"].items()}
        if saved_shapes != {name: tuple(average.shape) for name, average in self._averages.items()}:
            raise ConfigError(
                "the averaged weights of the checkpoint have other names or shapes than the model; use another --name"
            )
        for name, average in self._averages.items():
            average.copy_(state["averages"][name])
        self._num_updates = int(state["num_updates"])
