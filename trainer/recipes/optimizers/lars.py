"""LARS: SGD with a layer-wise learning rate (You, Gitman and Ginsburg 2017, arXiv:1708.03888)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from datasvc.trainer.recipes.optimizers.foreach_optimizer import ForeachOptimizer, layer_norms


class LARS(ForeachOptimizer):
    """Momentum SGD whose step in each layer is proportional to the norm of the layer's weights.

    A layer is one parameter tensor `w` with the gradient `g`. For each layer,
    `local = trust_coefficient * |w| / (|g| + weight_decay * |w|)` (algorithm 1),
    `u = momentum * u + local * (g + weight_decay * w)` and `w = w - lr * u`. The paper accumulates `lr * u` instead
    of `u`. At a constant rate both give the same weights. If the rate changes, this form includes the momentum
    correction of Goyal et al. 2017 (section 3, remark 2).

    Args:
        params: parameters, or parameter groups. A group with `adapt=False` has `local = 1`: plain momentum SGD.
        lr: global learning rate.
        momentum: decay of the accumulated steps `u`.
        weight_decay: L2 factor.
        trust_coefficient: norm of a layer's step at rate 1, as a fraction of the norm of its weights.
        nesterov: whether to use Nesterov momentum.

    Raises:
        ValueError: a factor is negative, or `nesterov` is set without momentum.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        nesterov: bool = False,
    ) -> None:
        if nesterov and not momentum:
            raise ValueError("nesterov is set and momentum is 0; expected a momentum above 0")
        factors = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
        }
        super().__init__(params, {**factors, "nesterov": nesterov, "adapt": True}, factors=tuple(factors))

    def step_group(self, group: Mapping[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        """Update `weights` by the equations of the class: `averages` is u, `directions` is what is added to u."""
        directions = list(torch._foreach_add(gradients, weights, alpha=group["weight_decay"]))  # noqa: SLF001
        if group["adapt"]:
            ratios = trust_ratios(
                weights, gradients, coefficient=group["trust_coefficient"], weight_decay=group["weight_decay"]
            )
            torch._foreach_mul_(directions, ratios)
        if group["momentum"]:
            averages = self.averages_of(weights, "momentum")
            torch._foreach_mul_(averages, group["momentum"])
            torch._foreach_add_(averages, directions)
            if group["nesterov"]:
                torch._foreach_add_(directions, averages, alpha=group["momentum"])
            else:
                directions = averages
        torch._foreach_add_(weights, directions, alpha=-group["lr"])


def trust_ratios(
    weights: list[Tensor], gradients: list[Tensor], *, coefficient: float, weight_decay: float
) -> list[Tensor]:
    """Return the local rate of each layer (algorithm 1) as a 0-dimensional tensor.

    `coefficient` is eta of the paper, `weight_decay` is beta. The rate is 1 for a layer whose weights are all 0, as
    it could otherwise never change, and for a layer whose denominator is 0.
    """
    weight_norms, gradient_norms = layer_norms(weights), layer_norms(gradients)
    denominators = gradient_norms + weight_decay * weight_norms
    ratios = torch.where((weight_norms > 0) & (denominators > 0), coefficient * weight_norms / denominators, 1.0)
    return list(ratios.unbind())
