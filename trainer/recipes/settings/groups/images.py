"""The group of settings of how images are prepared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.settings.groups.setting_group import Metavar, Range, SettingGroup

if TYPE_CHECKING:
    from datasvc.loaders.augment.augment import AugmentConfig
    from datasvc.loaders.augment.transform import Transform


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
        jitter: spreads of random changes of brightness, contrast, saturation and hue, such as "0.4,0.4,0.4,0.1"; see
            `AugmentConfig`. None: no changes.
        transform: function "module:function" that is called with each image after crop and flip, in training and
            evaluation: (`uint8[size, size, 3]`, random generator) -> image of the same shape; see `AugmentConfig`.
        mean: mean of each channel in 0..1, which is subtracted; that of ImageNet by default.
        std: standard deviation of each channel, by which the difference is divided.
    """

    title: ClassVar[str] = "images"

    size: Annotated[int, Metavar("PIXELS"), Range(1)] = 224
    resize: Annotated[int | None, Metavar("PIXELS")] = None
    # A test compares the choices with `augment.Evaluation`, whose module takes long to import.
    evaluation: Literal["torchvision", "window"] = "torchvision"
    scale: Annotated[tuple[float, float], Metavar("MIN MAX")] = (0.08, 1.0)
    ratio: Annotated[tuple[float, float], Metavar("MIN MAX")] = (3 / 4, 4 / 3)
    flip: Annotated[float, Metavar("PROBABILITY")] = 0.5
    jitter: Annotated[str | None, Metavar("BRIGHTNESS,CONTRAST,SATURATION,HUE")] = None
    transform: Annotated[str | None, Metavar("MODULE:FUNCTION")] = None
    mean: Annotated[tuple[float, float, float], Metavar("RED GREEN BLUE")] = (0.485, 0.456, 0.406)
    std: Annotated[tuple[float, float, float], Metavar("RED GREEN BLUE")] = (0.229, 0.224, 0.225)

    def check(self) -> None:
        """Check that the centre crop fits, and the form of the transform; `build_augment` checks the rest."""
        if self.resize is not None and self.resize < self.size:
            raise ConfigError(
                f"resize is {self.resize}, below size {self.size}, so the centre crop does not fit; give a larger "
                "--resize or a smaller --size"
            )
        if self.transform is not None and not all(self.transform.partition(":")):
            raise ConfigError(
                f"transform is {self.transform!r}; expected 'module:function', such as 'my_package.images:blur'"
            )

    def build_augment(self, transform: Transform | None = None) -> AugmentConfig:
        """Return the configuration of the loader; `transform` is the function that the setting names.

        Raises:
            ConfigError: a setting has another form, or is out of range.
        """
        # Imported here, because it takes longer than all other checks.
        from datasvc.loaders.augment.augment import AugmentConfig

        try:
            brightness, contrast, saturation, hue = map(float, (self.jitter or "0,0,0,0").split(","))
        except ValueError as error:
            raise ConfigError(
                f"jitter is {self.jitter!r}; expected four numbers with commas, for brightness, contrast, saturation "
                "and hue, such as 0.4,0.4,0.4,0.1"
            ) from error
        return AugmentConfig(
            scale=self.scale,
            ratio=self.ratio,
            flip=self.flip,
            brightness=brightness,
            contrast=contrast,
            saturation=saturation,
            hue=hue,
            resize=self.resize,
            evaluation=self.evaluation,
            transform=transform,
        )
