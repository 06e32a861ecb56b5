"""LARS, LAMB and RMSpropSGD: optimizers for large batches, on a base that updates all tensors with foreach kernels.

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


def trust_ratios(
    weights: list[Tensor], steps: list[Tensor], *, coefficient: float = 1.0, weight_decay: float = 0.0
) -> list[Tensor]:
    """Return `coefficient * |w| / (|step| + weight_decay * |w|)` of each layer, as 0-dimensional tensors.

    For LARS (algorithm 1), the steps are gradients, the coefficient is eta and the decay beta of the paper; for LAMB
    (algorithm 2), they are the steps that AdamW would take at rate 1. The ratio is 1 for a layer whose weights are
    all 0, as it could otherwise never change, and for a layer whose denominator is 0.
    """
    weight_norms, step_norms = (torch.stack(list(torch._foreach_norm(each))) for each in (weights, steps))  # noqa: SLF001
    denominators = step_norms + weight_decay * weight_norms
    ratios = torch.where((weight_norms > 0) & (denominators > 0), coefficient * weight_norms / denominators, 1.0)
    return list(ratios.unbind())


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
