"""The group of settings of the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.optimizers.schedules import RateScaling, Shape
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup


@dataclass(frozen=True, kw_only=True)
class RateSettings(SettingGroup):
    """The learning rate of each step.

    Attributes:
        learning_rate: peak rate, for the reference batch if `rate_scaling` scales it, else for the global batch.
        rate_scaling: how the rate grows with the global batch: "linear", "sqrt" or "none".
        reference_batch: global batch for which `learning_rate` is given, if it is scaled.
        schedule: decay of the rate after the warm-up: "cosine", "step", "polynomial" or "constant".
        milestones: for the schedule "step": each "epoch:factor"; from that epoch on the rate is peak * factor.
        power: exponent of the schedule "polynomial".
        warmup_epochs: epochs of linear warm-up, fractions allowed.
        warmup_start: rate at the start of the warm-up; it is not scaled.
    """

    title: ClassVar[str] = "learning rate"

    learning_rate: Annotated[float, Metavar("RATE"), Range(0)] = 0.1
    rate_scaling: RateScaling = "none"
    reference_batch: Annotated[int, Metavar("SAMPLES"), Range(1)] = 256
    schedule: Shape = "cosine"
    milestones: Annotated[tuple[str, ...], Metavar("EPOCH:FACTOR")] = ()
    power: Annotated[float, Metavar("EXPONENT"), Range(0)] = 2.0
    warmup_epochs: Annotated[float, Metavar("EPOCHS"), Range(0)] = 1.0
    warmup_start: Annotated[float, Metavar("RATE"), Range(0)] = 0.0

    def check(self) -> None:
        """Check the form of the milestones."""
        self.parse_milestones()

    def parse_milestones(self) -> tuple[tuple[float, float], ...]:
        """Return `(epoch, factor)` of each milestone. Raises ConfigError: a milestone has another form."""
        pairs = [milestone.partition(":") for milestone in self.milestones]
        message = (
            f"milestones are {self.milestones}; expected each as 'epoch:factor', such as '30:0.1', with two numbers "
            "of 0 or more"
        )
        try:
            milestones = tuple((float(epoch), float(factor)) for epoch, _, factor in pairs)
        except ValueError as error:
            raise ConfigError(message) from error
        if not all(0 <= number < math.inf for milestone in milestones for number in milestone):
            raise ConfigError(message)
        return milestones
