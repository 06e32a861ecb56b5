"""Transition from RMSprop to momentum SGD during training (Akiba, Suzuki and Fukuda 2017, arXiv:1711.04325)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from datasvc.trainer.recipes.optimizers.foreach_optimizer import ForeachOptimizer


class RMSpropSGD(ForeachOptimizer):
    """Momentum over a weighted sum of the gradient (SGD) and the normalised gradient (RMSprop).

    With the weights `w`, the gradient `g` (weight decay included) and the weight `share` of SGD, 0..1:
    `v = decay * v + (1 - decay) * g^2`, `a = (1 - share) * rmsprop_rate / lr`,
    `u = momentum * u + (share + a / (sqrt(v) + eps)) * g`, `w = w - lr * u`. If `share` is 0, the update is that of
    RMSprop at the rate `rmsprop_rate`; if it is 1, that of SGD at the rate `lr`. The training loop sets `share`, as
    `group["sgd_share"]`, before each step to the value of `schedules.sgd_share`; before that it is 1.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate of SGD.
        rmsprop_rate: learning rate of RMSprop.
        momentum: decay of the accumulated steps `u`.
        decay: decay of the mean square `v`.
        eps: added to the denominator, so that it is never 0.
        weight_decay: L2 factor.

    Raises:
        ValueError: a factor is negative.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        rmsprop_rate: float = 3e-4,
        momentum: float = 0.9,
        decay: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        options = {
            "lr": lr,
            "rmsprop_rate": rmsprop_rate,
            "momentum": momentum,
            "decay": decay,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, {**options, "sgd_share": 1.0}, factors=tuple(options))

    def step_group(self, group: Mapping[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        """Update `weights` by the equations of the class: `squares` are v, `averages` are u, `decayed` are g."""
        squares, averages = self.averages_of(weights, "square"), self.averages_of(weights, "momentum")
        decayed = list(torch._foreach_add(gradients, weights, alpha=group["weight_decay"]))  # noqa: SLF001
        torch._foreach_mul_(squares, group["decay"])
        torch._foreach_addcmul_(squares, decayed, decayed, 1 - group["decay"])
        torch._foreach_mul_(averages, group["momentum"])
        torch._foreach_add_(averages, decayed, alpha=group["sgd_share"])
        # Skip the RMSprop part if lr is 0: the weights do not change then, and rmsprop_rate / lr is not defined.
        if group["sgd_share"] < 1 and group["lr"]:
            divisors = list(torch._foreach_sqrt(squares))  # noqa: SLF001
            torch._foreach_add_(divisors, group["eps"])
            torch._foreach_div_(decayed, divisors)
            torch._foreach_add_(
                averages, decayed, alpha=(1 - group["sgd_share"]) * group["rmsprop_rate"] / group["lr"]
            )
        torch._foreach_add_(weights, averages, alpha=-group["lr"])
