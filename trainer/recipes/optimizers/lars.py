"""LARS: a rate of its own for every layer (You, Gitman and Ginsburg 2017, arXiv:1708.03888)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from datasvc.trainer.recipes.optimizers.foreach_optimizer import ForeachOptimizer, layer_norms


class LARS(ForeachOptimizer):
    """Momentum SGD whose step in each layer is in proportion to the norm of the layer's weights.

    Layer by layer `local = trust_coefficient * |w| / (|g| + weight_decay * |w|)` (algorithm 1), and then
    `u = momentum * u + local * (g + weight_decay * w)`, `w = w - lr * u`. The paper accumulates `lr * u`: that is the
    same while the rate stays, and where it changes this is the paper's with the momentum correction of Goyal et al.
    2017, section 3, remark 2. So nothing is to be corrected when the rate changes.

    Args:
        params: parameters, or groups of them; a group with `adapt=False` has `local = 1`, plain momentum SGD.
        lr: global rate.
        momentum: share of the last direction that is kept.
        weight_decay: L2 factor.
        trust_coefficient: how far a layer may move at rate 1, as a share of its norm.
        nesterov: look ahead.

    Raises:
        ValueError: a factor is negative; nesterov without momentum.
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
            raise ValueError("nesterov needs a momentum")
        factors = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
        }
        super().__init__(params, {**factors, "nesterov": nesterov, "adapt": True}, factors=tuple(factors))

    def step_group(self, group: Mapping[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        """See the class."""
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
    """Return the local rate of each layer (algorithm 1), a tensor of no dimensions each.

    It is 1 where the formula says nothing: the weights are all 0, or weights and gradient call for no step.

    Args:
        weights: of the layers.
        gradients: of each.
        coefficient: the paper's eta.
        weight_decay: the paper's beta.
    """
    of_weights, of_gradients = layer_norms(weights), layer_norms(gradients)
    wanted = of_gradients + weight_decay * of_weights
    ratios = torch.where((of_weights > 0) & (wanted > 0), coefficient * of_weights / wanted, 1.0)
    return list(ratios.unbind())
