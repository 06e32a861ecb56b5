"""The part of the weights that one server holds, with the state of their optimizer. Thread-safe.

Invariant: a push changes nothing until `apply` names it. So a step of which some servers have a gradient and others
have not, because its worker was lost, is never applied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes an optimizer of parameter groups."""
Push = tuple[int, int]
"""Worker and number of the lease of which a gradient is."""


class ParameterShard:
    """Weights, an optimizer, and gradients that are not applied yet.

    Args:
        state: `weights`: float32 tensors by name; `moments`: state of the optimizer by name of the weight; `groups`:
            parameter groups, with names as `params`. As `take_shard` returns it.
        make_optimizer: makes the optimizer of the groups.

    Attributes:
        names: names of the weights, in the order in which pulled weights and pushed gradients have them.
        size: number of elements of all weights.
    """

    def __init__(self, state: Mapping[str, Any], make_optimizer: MakeOptimizer) -> None:
        self._lock = threading.Lock()
        self._staged: dict[Push, Tensor] = {}
        weights: dict[str, Tensor] = state["weights"]
        self.names = list(weights)
        sizes = [weight.numel() for weight in weights.values()]
        self.size = sum(sizes)
        # One buffer for all weights: a pull is one copy, and the optimizer changes the buffer in place.
        self._weights = torch.cat(
            [torch.empty(0, device="cpu"), *(weight.detach().flatten() for weight in weights.values())]
        )
        self._gradients = torch.zeros_like(self._weights)
        self._parameters: dict[str, nn.Parameter] = {}
        parts = zip(torch.split(self._weights, sizes), torch.split(self._gradients, sizes), strict=True)
        for (name, weight), (part, gradient) in zip(weights.items(), parts, strict=True):
            self._parameters[name] = nn.Parameter(part.view(weight.shape))
            self._parameters[name].grad = gradient.view(weight.shape)
        groups = [
            {**group, "params": [self._parameters[name] for name in group["params"]]} for group in state["groups"]
        ]
        # A server may hold no weight: there are more servers than weights.
        self._optimizer = make_optimizer(groups) if self.names else None
        for name, moments in state["moments"].items():
            assert self._optimizer is not None
            self._optimizer.state[self._parameters[name]] = dict(moments)

    def pull(self) -> Tensor:
        """Return a copy of the weights: `float32[size]`."""
        with self._lock:
            return self._weights.clone()

    def stage(self, push: Push, gradients: Tensor) -> None:
        """Keep the gradients of a part of a step, `float32[size]`, until `apply` or `discard` names it."""
        with self._lock:
            self._staged[push] = gradients

    def discard(self, push: Push) -> None:
        """Forget the gradients of a lost worker, if they are here."""
        with self._lock:
            self._staged.pop(push, None)

    @torch.no_grad()
    def apply(self, pushes: Sequence[Push], *, num_targets: int, rate: float) -> None:
        """Make one step of the optimizer with the sum of pushed gradients, divided by `num_targets`.

        Without targets, no weight changes: momentum and weight decay would move them all the same.
        """
        with self._lock:
            staged = [self._staged.pop(push) for push in pushes]
            if not num_targets or self._optimizer is None:
                return
            self._gradients.copy_(staged[0])
            for gradients in staged[1:]:
                self._gradients.add_(gradients)
            self._gradients.div_(num_targets)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return copies of `weights` and `moments`, see the class. Call this while no push is on the way."""
        with self._lock:
            self._staged.clear()  # what lost workers had sent
            moments = {} if self._optimizer is None else self._optimizer.state
            return {
                "weights": {name: parameter.detach().clone() for name, parameter in self._parameters.items()},
                "moments": {
                    name: {key: _copy(value) for key, value in moments[parameter].items()}
                    for name, parameter in self._parameters.items()
                    if parameter in moments
                },
            }


def take_shard(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of a `ParameterShard` with some of the weights of an optimizer.

    Args:
        parameters: the weights of the shard by name.
        optimizer: optimizer of these weights and of others.
    """
    names = {parameter: name for name, parameter in parameters.items()}
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"] if parameter in names]}
        for group in optimizer.param_groups
    ]
    return {
        "weights": {name: parameter.detach().cpu() for name, parameter in parameters.items()},
        "groups": [group for group in groups if group["params"]],
        "moments": {
            name: {key: _copy(value) for key, value in optimizer.state[parameter].items()}
            for name, parameter in parameters.items()
            if parameter in optimizer.state
        },
    }


@torch.no_grad()
def put_back(
    state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Write the state of a shard into the weights and the optimizer from which `take_shard` has taken it."""
    for name, weight in state["weights"].items():
        parameters[name].copy_(weight)
    for name, moments in state["moments"].items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            # As `Optimizer.load_state_dict`: counters stay in host memory.
            key: value.to(parameter.device) if torch.is_tensor(value) and key != "step" else value
            for key, value in moments.items()
        }


def _copy(value: Any) -> Any:
    return value.detach().cpu().clone() if torch.is_tensor(value) else value
