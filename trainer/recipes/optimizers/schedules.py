"""Learning rates as pure functions of how much was learned from, in epochs: so they survive a resize of the job."""

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
    """The rate of every step of a run: a gradual warm-up, then a decay.

    Attributes:
        peak: rate at the end of the warm-up, scaled to the global batch.
        epochs: of the whole run.
        shape: "cosine" (Loshchilov and Hutter 2017), "step", "polynomial" (You et al. 2017) or "constant".
        warmup_epochs: of the warm-up, in which the rate rises by the same amount each step (Goyal et al. 2017,
            section 2.2); fractions allowed.
        warmup_start: rate that it rises from; Goyal et al. take the one before scaling.
        milestones: "step": `(epoch, factor)` in order: from that epoch on the rate is the peak's share of it.
        power: "polynomial": of the share that is left.

    Raises:
        ConfigError: out of range.
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
            raise ConfigError(f"milestones are at the epochs {epochs}; expected each later than the one before")
        if self.shape == "step" and not self.milestones:
            raise ConfigError("the schedule 'step' needs milestones: such as --milestones 30:0.1 60:0.01 80:0.001")

    def rate_at(self, progress: float, *, after: float | None = None) -> float:
        """Return the rate of a step.

        The warm-up rises by what the step brings, and so reaches the peak with its last step; the decay falls by what
        was done before, and so begins at the peak and leaves the last step a rate.

        Args:
            progress: epochs served before it, with the share of the current one.
            after: epochs served once it is done; None: the same, as if the step were infinitely small.
        """
        after = progress if after is None else after
        if after < self.warmup_epochs:
            return self.warmup_start + (self.peak - self.warmup_start) * after / self.warmup_epochs
        return self.peak * self._factor(max(progress, self.warmup_epochs))

    def _factor(self, progress: float) -> float:
        left = 1.0 - min((progress - self.warmup_epochs) / max(self.epochs - self.warmup_epochs, 1e-9), 1.0)
        match self.shape:
            case "cosine":
                return 0.5 * (1 + math.cos(math.pi * (1.0 - left)))
            case "polynomial":
                return float(left**self.power)
            case "step":
                return next((factor for epoch, factor in reversed(self.milestones) if progress >= epoch), 1.0)
        return 1.0


def sgd_share(progress: float, *, center: float = 10.0, period: float = 5.0) -> float:
    """Return how far a run has gone over from RMSprop to SGD, 0..1 (Akiba et al. 2017).

    An exponential up to one half at `center`, then a line of the same slope, which reaches 1 half a `period` later.

    Args:
        progress: epochs served.
        center: epoch at which both have the same weight.
        period: of the transition, in epochs.
    """
    distance = (progress - center) / period
    return 0.5 * math.exp(2 * distance) if distance < 0 else min(0.5 + distance, 1.0)
