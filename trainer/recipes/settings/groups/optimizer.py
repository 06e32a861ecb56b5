"""The group of settings of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.optimizers.parameter_groups import Decayed
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(SettingGroup):
    """How gradients change the weights; for the learning rate see `RateSettings`.

    Attributes:
        optimizer: "sgd", "lars", "lamb", "adamw" or "rmsprop-sgd".
        momentum: momentum of SGD, LARS and RMSprop-SGD.
        nesterov: whether SGD and LARS use Nesterov momentum.
        betas: decay rates of the two moments of AdamW and LAMB.
        weight_decay: factor of the weight decay; decoupled in LAMB and AdamW, L2 in the other optimizers.
        decayed: "weights" exempts biases and normalisations from weight decay, and from the layer-wise rates of
            LARS and LAMB; "all" exempts none.
        trust_coefficient: trust coefficient of LARS.
        rmsprop_rate: rate of the RMSprop phase of RMSprop-SGD.
        clip_norm: maximum norm of the whole gradient; None: not clipped.
    """

    title: ClassVar[str] = "optimizer"

    optimizer: Literal["sgd", "lars", "lamb", "adamw", "rmsprop-sgd"] = "sgd"
    momentum: Annotated[float, Metavar("FACTOR"), Range(0)] = 0.9
    nesterov: bool = False
    betas: Annotated[tuple[float, float], Metavar("BETA1 BETA2"), Range(0, 1)] = (0.9, 0.999)
    weight_decay: Annotated[float, Metavar("FACTOR"), Range(0)] = 1e-4
    decayed: Decayed = "weights"
    trust_coefficient: Annotated[float, Metavar("FACTOR"), Range(0)] = 0.001
    rmsprop_rate: Annotated[float, Metavar("RATE"), Range(0)] = 3e-4
    clip_norm: Annotated[float | None, Metavar("NORM"), Range(0)] = None

    def check(self) -> None:
        """Check that the optimizer has Nesterov momentum, if that is asked for."""
        if self.nesterov and not (self.momentum and self.optimizer in ("sgd", "lars")):
            raise ConfigError(
                "nesterov works with the optimizers 'sgd' and 'lars' only, and needs a momentum above 0"
            )
