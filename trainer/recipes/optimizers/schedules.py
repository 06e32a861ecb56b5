"""Learning-rate schedules: pure functions of the progress in epochs, which do not depend on the world size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from datasvc.errors import ConfigError

Shape = Literal["cosine", "step", "polynomial", "constant"]
SHAPES: tuple[str, ...] = get_args(Shape)


@dataclass(frozen=True)
class RateSchedule:
    """Learning rate of every step of a run: a gradual warm-up, then a decay.

    Attributes:
        peak: rate at the end of the warm-up, scaled to the global batch.
        epochs: length of the whole run, epochs.
        shape: decay: "cosine" (Loshchilov and Hutter 2017), "step", "polynomial" (You et al. 2017) or "constant".
        warmup_epochs: length of the warm-up in epochs, fractions allowed. The rate rises by the same amount in each
            step (Goyal et al. 2017, section 2.2).
        warmup_start: rate at the start of the warm-up; Goyal et al. use the rate before scaling.
        milestones: for "step": pairs `(epoch, factor)` in order of epochs; from `epoch` on, the rate is
            `factor * peak`.
        power: for "polynomial": exponent of the fraction of the decay that remains.

    Raises:
        ConfigError: the shape does not exist, or the milestones are missing or not in order.
    """

    peak: float
    epochs: float
    shape: str = "cosine"
    warmup_epochs: float = 0.0
    warmup_start: float = 0.0
    milestones: Sequence[tuple[float, float]] = ()
    power: float = 2.0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ConfigError(f"schedule is {self.shape!r}; expected one of {', '.join(SHAPES)}")
        epochs = [epoch for epoch, _ in self.milestones]
        if epochs != sorted(set(epochs)):
            raise ConfigError(f"epochs of the milestones are {epochs}; expected increasing epochs")
        if self.shape == "step" and not self.milestones:
            raise ConfigError("schedule 'step' needs milestones, for example --milestones 30:0.1 60:0.01 80:0.001")

    def rate_at(self, progress: float, *, after: float | None = None) -> float:
        """Return the rate of a step.

        Args:
            progress: epochs completed before the step, with the fraction of the current one.
            after: epochs completed after the step; default: `progress`.
        """
        # The warm-up counts this step, so its last step has the peak rate. The decay does not count it, so the first
        # step of the decay has the peak rate and the last step of the run has a rate above 0.
        after = progress if after is None else after
        if after < self.warmup_epochs:
            return self.warmup_start + (self.peak - self.warmup_start) * after / self.warmup_epochs
        return self.peak * self._factor(max(progress, self.warmup_epochs))

    def _factor(self, progress: float) -> float:
        remaining = 1.0 - min((progress - self.warmup_epochs) / max(self.epochs - self.warmup_epochs, 1e-9), 1.0)
        match self.shape:
            case "cosine":
                return 0.5 * (1 + math.cos(math.pi * (1.0 - remaining)))
            case "polynomial":
                return float(remaining**self.power)
            case "step":
                return next((factor for epoch, factor in reversed(self.milestones) if progress >= epoch), 1.0)
        return 1.0


def sgd_share(progress: float, *, center: float = 10.0, period: float = 5.0) -> float:
    """Return the weight of SGD in the transition from RMSprop to SGD, 0..1 (Akiba et al. 2017).

    The weight rises exponentially to 0.5 at `center`, then linearly with the same slope; it is 1 from
    `center + period / 2` on.

    Args:
        progress: completed epochs.
        center: epoch at which both have the weight 0.5.
        period: length of the transition, epochs.
    """
    distance = (progress - center) / period
    return 0.5 * math.exp(2 * distance) if distance < 0 else min(0.5 + distance, 1.0)
