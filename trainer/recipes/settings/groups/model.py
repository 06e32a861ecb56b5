"""The group of settings of the model and its loss."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup

IMAGE_MODEL: Final = "small-cnn"
"""The default model of image data."""

TEXT_MODEL: Final = "gpt"
"""The default model of token data."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings(SettingGroup):
    """What a run trains.

    Attributes:
        model: small-cnn, resnet18, resnet34, resnet50, resnet101, resnet152, alexnet, googlenet, inception-v3, vgg16,
            gpt, gpt2 or gpt2-medium; or "MODULE:FUNCTION", your own. None: small-cnn for images, gpt for tokens.
        model_option: options of the model, each "name=value" with a JSON value: "dropout=0.1".
        sync_batch_norm: whether batch normalisation uses the samples of all ranks in a backward pass, so that the
            training is the same at any number of ranks.
        label_smoothing: share of each target that is spread over all classes.
        ema_decay: decay of the moving average of the weights, which is evaluated too; None: no average.
    """

    title: ClassVar[str] = "model and loss"

    model: Annotated[str | None, Metavar("NAME")] = None
    model_option: Annotated[tuple[str, ...], Metavar("NAME=VALUE")] = ()
    sync_batch_norm: bool = False
    label_smoothing: Annotated[float, Metavar("SHARE"), Range(0, 1)] = 0.0
    ema_decay: Annotated[float | None, Metavar("FACTOR"), Range(0, 1)] = None

    def check(self) -> None:
        """Check the form of the model's options."""
        self.parse_model_options()

    def parse_model_options(self) -> dict[str, Any]:
        """Return the options of the model by name.

        Raises:
            ConfigError: an option has another form, or its value is not JSON.
        """
        options = {}
        for option in self.model_option:
            name, _, value = option.partition("=")
            try:
                options[name] = json.loads(value)
            except ValueError as error:
                raise ConfigError(f"model_option is {option!r}; expected 'name=value' with a JSON value") from error
        return options
