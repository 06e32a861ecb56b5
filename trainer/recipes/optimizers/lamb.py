"""LAMB: Adam with a layer-wise learning rate (You et al. 2019, arXiv:1904.00962)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from datasvc.trainer.recipes.optimizers.foreach_optimizer import ForeachOptimizer, layer_norms


class LAMB(ForeachOptimizer):
    """Adam whose step in each layer has the norm `lr * |w|` (algorithm 2); a layer is one parameter tensor.

    `m` and `v` are Adam's averages with bias correction. The update is `r = m / (sqrt(v) + eps) + weight_decay * w`
    and `w = w - lr * |w| / |r| * r`. The function phi of the paper is the identity here. The averages do not contain
    the learning rate, so a change of the rate needs no momentum correction.

    Args:
        params: parameters, or parameter groups. A group with `adapt=False` is updated by `lr * r`, as in AdamW.
        lr: global learning rate.
        betas: decay of the averages of the gradient and of the squared gradient.
        eps: added to the denominator, so that it is never 0.
        weight_decay: factor of the weights in `r` (decoupled weight decay).

    Raises:
        ValueError: `lr`, `eps` or `weight_decay` is negative, or a beta is outside 0 <= beta < 1.
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
        """Update `weights` by the equations of the class: `steps` is r, `divisors` is sqrt(v) + eps."""
        keep_mean, keep_square = group["betas"]
        means, squares = self.averages_of(weights, "mean"), self.averages_of(weights, "square")
        counts = [self._count_step(weight) for weight in weights]
        torch._foreach_lerp_(means, gradients, 1 - keep_mean)
        torch._foreach_mul_(squares, keep_square)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - keep_square)
        # Bias correction: averages that start at zero are too small in the first steps, so the next lines divide both
        # by 1 - beta ** count.
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
        """Return the number of updates of this weight, this one included.

        Bias correction counts per weight, because some weights get their first gradient later than others.
        """
        count = int(self.state[weight].get("step", 0)) + 1
        self.state[weight]["step"] = count
        return count


def trust_ratios(weights: list[Tensor], steps: list[Tensor]) -> list[Tensor]:
    """Return the trust ratio `|w| / |r|` of each layer as a 0-dimensional tensor; 1 if either norm is 0.

    `steps` are the `r` of the layers, the steps that AdamW would take at rate 1.
    """
    weight_norms, step_norms = layer_norms(weights), layer_norms(steps)
    ratios = torch.where((weight_norms > 0) & (step_norms > 0), weight_norms / step_norms, 1.0)
    return list(ratios.unbind())
