"""What our optimizers share: a step over groups of parameters, many tensors at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class ForeachOptimizer(torch.optim.Optimizer):
    """An optimizer that steps the parameters of a group that have a gradient, all in one call.

    Args:
        params: parameters, or groups of them.
        defaults: settings of a group that says nothing else.
        factors: names of those that may not be negative.

    Raises:
        ValueError: one of them is.
    """

    def __init__(self, params: Any, defaults: Mapping[str, Any], *, factors: tuple[str, ...]) -> None:
        for name in factors:
            if not defaults[name] >= 0:
                raise ValueError(f"{name} is {defaults[name]}; expected a number, not below 0")
        super().__init__(params, dict(defaults))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; returns what the closure did."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self.step_group(group, weights, [weight.grad for weight in weights])
        return loss

    @abstractmethod
    def step_group(self, group: Mapping[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        """Change the weights in place; leave the gradients as they are."""

    def averages_of(self, weights: list[Tensor], name: str) -> list[Tensor]:
        """Return the averages that are kept under a name for each weight, zeros to begin with."""
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return [self.state[weight][name] for weight in weights]


def layer_norms(tensors: list[Tensor]) -> Tensor:
    """Return the 2-norm of each, `[n]`."""
    return torch.stack(list(torch._foreach_norm(tensors)))  # noqa: SLF001
