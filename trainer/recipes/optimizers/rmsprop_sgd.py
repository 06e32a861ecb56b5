"""RMSprop that becomes momentum SGD while it trains (Akiba, Suzuki and Fukuda 2017, arXiv:1711.04325)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from datasvc.trainer.recipes.optimizers.foreach_optimizer import ForeachOptimizer


class RMSpropSGD(ForeachOptimizer):
    """One momentum whose input is a mix of the gradient and of RMSprop's.

    `v = decay * v + (1 - decay) * g^2`, `a = (1 - share) * rmsprop_rate / lr`,
    `u = momentum * u + (share + a / (sqrt(v) + eps)) * g`, `w = w - lr * u`. At `share` 0 a step is RMSprop's at its
    own rate, at 1 it is SGD's; the loop moves `group["sgd_share"]`, see `schedules.sgd_share`.

    Args:
        params: parameters, or groups of them.
        lr: rate of SGD.
        rmsprop_rate: rate of RMSprop.
        momentum: share of the last direction that is kept.
        decay: share of the last mean square that is kept.
        eps: keeps the quotient finite.
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
        """See the class."""
        squares, averages = self.averages_of(weights, "square"), self.averages_of(weights, "momentum")
        decayed = list(torch._foreach_add(gradients, weights, alpha=group["weight_decay"]))  # noqa: SLF001
        torch._foreach_mul_(squares, group["decay"])
        torch._foreach_addcmul_(squares, decayed, decayed, 1 - group["decay"])
        torch._foreach_mul_(averages, group["momentum"])
        torch._foreach_add_(averages, decayed, alpha=group["sgd_share"])
        # At rate 0 nothing steps, and the quotient of the rates has no meaning.
        if group["sgd_share"] < 1 and group["lr"]:
            divisors = list(torch._foreach_sqrt(squares))  # noqa: SLF001
            torch._foreach_add_(divisors, group["eps"])
            torch._foreach_div_(decayed, divisors)
            torch._foreach_add_(
                averages, decayed, alpha=(1 - group["sgd_share"]) * group["rmsprop_rate"] / group["lr"]
            )
        torch._foreach_add_(weights, averages, alpha=-group["lr"])
