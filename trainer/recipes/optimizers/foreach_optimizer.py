"""Base class of LARS, LAMB and RMSpropSGD: one step updates all tensors of a parameter group with foreach kernels.

A foreach kernel works on a list of tensors in one launch (`torch._foreach_*`). A model has many small tensors, so on
a GPU a few launches for all of them take less time than a few launches per tensor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class ForeachOptimizer(torch.optim.Optimizer):
    """Optimizer that updates, in one call per group, all parameters of the group that have a gradient.

    Args:
        params: parameters, or parameter groups.
        defaults: settings of each group that does not set its own.
        factors: names of the settings in `defaults` that must not be negative. Settings of a single group are not
            checked.

    Raises:
        ValueError: a default named in `factors` is negative or NaN.
    """

    def __init__(self, params: Any, defaults: Mapping[str, Any], *, factors: tuple[str, ...]) -> None:
        for name in factors:
            # Written with `not`, so that NaN is refused too.
            if not defaults[name] >= 0:
                raise ValueError(f"{name} is {defaults[name]}; expected a number, not below 0")
        super().__init__(params, dict(defaults))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the result of `closure`, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # Like torch's optimizers, skip a weight without a gradient, because it did not take part in the step.
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for chosen in _by_mesh(weights):
                gradients = [weight.grad for weight in chosen if weight.grad is not None]
                self.step_group(group, chosen, gradients)
        return loss

    @abstractmethod
    def step_group(self, group: Mapping[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        """Update `weights`, all from one parameter group, in place. An implementation must not change `gradients`.

        Args:
            group: the parameter group with its settings.
            weights: parameters of the group that have a gradient; those of one device mesh, if they are divided.
            gradients: the gradient of each of `weights`.
        """

    def averages_of(self, weights: list[Tensor], name: str) -> list[Tensor]:
        """Return the running average `name` of each weight, to be updated in place; an average starts at zero."""
        # An average is created at the first gradient of its weight, so a frozen weight needs no memory for averages.
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return [self.state[weight][name] for weight in weights]


def _by_mesh(weights: list[Any]) -> Iterable[list[Any]]:
    """Return the tensors by the mesh over which they are divided, because a kernel needs tensors of one mesh."""
    groups: dict[Any, list[Any]] = {}
    for weight in weights:
        groups.setdefault(getattr(weight, "device_mesh", None), []).append(weight)
    return groups.values()


def layer_norms(tensors: list[Tensor]) -> Tensor:
    """Return the 2-norm of each tensor, `float[len(tensors)]`."""
    return torch.stack(list(torch._foreach_norm(tensors)))  # noqa: SLF001
