"""Learning rates: scaled with the global batch, and scheduled as a pure function of the progress in epochs.

The rate of a step does not depend on the number of earlier steps or on the number of ranks. A run that continues at
another world size with the same global batch therefore keeps its rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from datasvc.errors import ConfigError

Shape = Literal["cosine", "step", "polynomial", "constant"]
RateScaling = Literal["none", "linear", "sqrt"]

# The transition from RMSprop to SGD (Akiba et al. 2017): the epoch at which SGD has the weight 0.5, and the unit of
# time of the transition.
_CENTER_EPOCH: Final = 10.0
_PERIOD_EPOCHS: Final = 5.0


@dataclass(frozen=True)
class RateSchedule:
    """The learning rate as a function of progress: a gradual warm-up, then a decay.

    Attributes:
        peak: rate at the end of the warm-up, scaled to the global batch.
        epochs: length of the whole run in epochs.
        shape: form of the decay, "cosine" as in Loshchilov and Hutter 2017, "polynomial" as in You
            et al. 2017.
        warmup_epochs: length of the warm-up in epochs, fractions allowed. The rate rises by the same amount in each
            step (Goyal et al. 2017, section 2.2).
        warmup_start: rate at the start of the warm-up; Goyal et al. use the rate before scaling.
        milestones: for "step": pairs `(epoch, factor)` in order of epochs; from `epoch` on, the rate is
            `factor * peak`.
        power: for "polynomial": exponent of the fraction of the decay that remains.

    Raises:
        ConfigError: the milestones are not in order, or `shape` is "step" and there are none.
    """

    peak: float
    epochs: float
    shape: Shape = "cosine"
    warmup_epochs: float = 0.0
    warmup_start: float = 0.0
    milestones: Sequence[tuple[float, float]] = ()
    power: float = 2.0

    def __post_init__(self) -> None:
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
        return self.peak * self._decay_factor(max(progress, self.warmup_epochs))

    def _decay_factor(self, progress: float) -> float:
        """Return the rate as a fraction of the peak rate, for a progress after the warm-up."""
        decay_epochs = max(self.epochs - self.warmup_epochs, 1e-9)  # not 0, even if the warm-up takes the whole run
        remaining = 1.0 - min((progress - self.warmup_epochs) / decay_epochs, 1.0)
        match self.shape:
            case "cosine":
                return 0.5 * (1 + math.cos(math.pi * (1.0 - remaining)))
            case "polynomial":
                return float(remaining**self.power)
            case "step":
                # The factor of the last milestone that is reached; the peak rate before the first one.
                return next((factor for epoch, factor in reversed(self.milestones) if progress >= epoch), 1.0)
        return 1.0  # "constant"


def scale_rate(rate: float, *, rule: RateScaling, global_batch: int, reference_batch: int) -> float:
    """Return the learning rate for a global batch, scaled from `rate`, which was chosen for a reference batch.

    The rate is scaled, never the loss, because with weight decay the two are not equivalent (Goyal et al. 2017,
    remark 1).

    Args:
        rate: learning rate for `reference_batch`.
        rule: "linear" multiplies the rate by the ratio of the batch sizes (Goyal et al., section 2.1). "sqrt"
            multiplies it by the square root of the ratio, which keeps the variance of the steps (Krizhevsky 2014;
            You et al. 2019 for LAMB). "none" returns it unchanged.
        global_batch: samples of all ranks per step.
        reference_batch: samples per step for which `rate` was chosen.
    """
    ratio = global_batch / reference_batch
    return rate * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def sgd_share(progress: float) -> float:
    """Return the weight of SGD, 0..1, in the transition from RMSprop to SGD after `progress` epochs.

    The weight rises exponentially to 0.5 at epoch 10, then linearly with the slope that it has there. It is 1 from
    epoch 12.5 on.
    """
    distance = (progress - _CENTER_EPOCH) / _PERIOD_EPOCHS
    return 0.5 * math.exp(2 * distance) if distance < 0 else min(0.5 + distance, 1.0)
