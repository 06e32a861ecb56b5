"""The group of settings of how images are prepared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup


@dataclass(frozen=True, kw_only=True)
class ImageSettings(SettingGroup):
    """How images are cropped and scaled, and which random changes the training makes.

    Attributes:
        size: side of the images, in pixels.
        resize: pixels of the shorter side to which the evaluation scales an image before its centre crop; None:
            size * 256 / 224.
        evaluation: scaling and cropping of the images of the evaluation: "torchvision", as torchvision's `Resize` and
            `CenterCrop`, or "window", which is faster and less exact; versions without this setting used "window".
        scale: range of a random crop's area, as a share of the image's.
        ratio: range of a random crop's width / height.
        flip: probability of a horizontal flip.
    """

    title: ClassVar[str] = "images"

    size: Annotated[int, Metavar("PIXELS"), Range(1)] = 224
    resize: Annotated[int | None, Metavar("PIXELS")] = None
    # A test compares the choices with `augment.Evaluation`, whose module takes long to import.
    evaluation: Literal["torchvision", "window"] = "torchvision"
    scale: Annotated[tuple[float, float], Metavar("MIN MAX")] = (0.08, 1.0)
    ratio: Annotated[tuple[float, float], Metavar("MIN MAX")] = (3 / 4, 4 / 3)
    flip: Annotated[float, Metavar("PROBABILITY")] = 0.5

    def check(self) -> None:
        """Check that the centre crop fits. `AugmentConfig` checks the random changes."""
        if self.resize is not None and self.resize < self.size:
            raise ConfigError(
                f"resize is {self.resize}, below size {self.size}, so the centre crop does not fit; give a larger "
                "--resize or a smaller --size"
            )
