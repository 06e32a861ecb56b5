"""LAMB: Adam with a rate of its own for every layer (You et al. 2019, arXiv:1904.00962)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from datasvc.trainer.recipes.optimizers.foreach_optimizer import ForeachOptimizer, layer_norms


class LAMB(ForeachOptimizer):
    """Adam whose step in each layer has the norm of the layer's weights, times the rate (algorithm 2).

    `m` and `v` are Adam's averages with their bias corrected, `r = m / (sqrt(v) + eps) + weight_decay * w`, and
    `w = w - lr * |w| / |r| * r`; the function phi of the paper is the identity. The rate is outside of all averages:
    nothing is to be corrected when it changes.

    Args:
        params: parameters, or groups of them; a group with `adapt=False` steps by `lr * r`, that is AdamW.
        lr: global rate.
        betas: shares of the last averages of gradient and squared gradient that are kept.
        eps: keeps the quotient finite.
        weight_decay: factor of the weights in the step, apart from the averages.

    Raises:
        ValueError: a factor is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas are {betas}; expected 0 <= beta < 1")
        factors = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**factors, "betas": betas, "adapt": True}, factors=tuple(factors))

    def step_group(self, group: Mapping[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        """See the class."""
        keep_mean, keep_square = group["betas"]
        means, squares = self.averages_of(weights, "mean"), self.averages_of(weights, "square")
        counts = [self._count_step(weight) for weight in weights]
        torch._foreach_lerp_(means, gradients, 1 - keep_mean)
        torch._foreach_mul_(squares, keep_square)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - keep_square)
        divisors = list(torch._foreach_div(squares, [1 - keep_square**count for count in counts]))  # noqa: SLF001
        torch._foreach_sqrt_(divisors)
        torch._foreach_add_(divisors, group["eps"])
        steps = list(torch._foreach_div(means, [1 - keep_mean**count for count in counts]))  # noqa: SLF001
        torch._foreach_div_(steps, divisors)
        torch._foreach_add_(steps, weights, alpha=group["weight_decay"])
        if group["adapt"]:
            torch._foreach_mul_(steps, trust_ratios(weights, steps))
        torch._foreach_add_(weights, steps, alpha=-group["lr"])

    def _count_step(self, weight: Tensor) -> int:
        """Return how often this weight was stepped, now too: some get their first gradient late."""
        count = int(self.state[weight].get("step", 0)) + 1
        self.state[weight]["step"] = count
        return count


def trust_ratios(weights: list[Tensor], steps: list[Tensor]) -> list[Tensor]:
    """Return `|w| / |r|` of each layer, a tensor of no dimensions each; 1 where either is 0.

    Args:
        weights: of the layers.
        steps: what Adam with weight decay would step, of each.
    """
    of_weights, of_steps = layer_norms(weights), layer_norms(steps)
    ratios = torch.where((of_weights > 0) & (of_steps > 0), of_weights / of_steps, 1.0)
    return list(ratios.unbind())
