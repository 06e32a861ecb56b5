"""Outputs of images that keep their own shape: `Fit`, the sizes of the images, and the frame of their batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.loaders.augment.augment import (
    SHORTER_STREAM,
    AugmentConfig,
    Windows,
    draw,
    draw_flips,
    plan_whole_images,
)


@dataclass(frozen=True)
class Fit:
    """How images keep their own shape: whole images, each scaled by one factor, padded to the largest of their batch.

    Sizes are those of torchvision's `Resize(shorter, max_size=longer)`. Without arguments, images are not scaled.

    Attributes:
        shorter: length of the shorter side in pixels; several: training draws one per sample, and evaluation takes
            the last. It needs `longer`.
        longer: longest side in pixels. An image whose longer side would exceed it is made smaller. Without `shorter`,
            it is the longer side of all images.
        multiple: height and width of a batch are multiples of it, such as the largest stride of a model.
        max_bytes: the largest batch that the data set may give, in bytes of its images. A loader keeps up to
            `DecodeConfig.prefetch` + 2 batches. With larger ones, it is not created. The masks of the objects of a
            batch may take as many more, which is known only when the batch is read: it is an error then.

    Raises:
        ConfigError: a value is out of range or of another type.
    """

    shorter: int | tuple[int, ...] | None = None
    longer: int | None = None
    multiple: int = 1
    max_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            may_vary, may_be_none = name == "shorter", name in {"shorter", "longer"}
            numbers = value if may_vary and isinstance(value, tuple) else (value,)
            is_valid = numbers and all(isinstance(each, int) and each >= 1 for each in numbers)
            if not (is_valid or (may_be_none and value is None)):
                expected = "bytes" if name == "max_bytes" else "pixels"
                several = ", or a tuple of such numbers" if may_vary else ""
                raise ConfigError(f"{name} is {value!r}; expected {expected}, an integer of at least 1{several}")
        if self.shorter is not None and self.longer is None:
            raise ConfigError(f"shorter is {self.shorter} without longer, so that images have no largest size")

    def sizes(self, widths: Integers, heights: Integers, shorter: Integers) -> npt.NDArray[np.int32]:
        """Return the output size of images, height and width, `int32[n, 2]`; `shorter`: of each, if it is given."""
        sides = np.maximum(np.stack([heights, widths], axis=1).astype(np.int64), 1)
        if self.longer is None:
            return sides.astype(np.int32)
        short, long = sides.min(axis=1), sides.max(axis=1)
        if self.shorter is None:
            new_short, new_long = self.longer * short // long, np.full(len(sides), self.longer)
        else:
            new_short, new_long = shorter, shorter * long // short
            is_long = new_long > self.longer
            new_short = np.where(is_long, self.longer * new_short // np.maximum(new_long, 1), new_short)
            new_long = np.where(is_long, self.longer, new_long)
        is_tall = sides[:, 0] > sides[:, 1]
        sizes = np.stack([np.where(is_tall, new_long, new_short), np.where(is_tall, new_short, new_long)], axis=1)
        clipped: npt.NDArray[np.int32] = np.maximum(sizes, 1).astype(np.int32)
        return clipped

    def frame(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of a batch whose images have at most these."""
        return -(-max(height, 1) // self.multiple) * self.multiple, -(-max(width, 1) // self.multiple) * self.multiple

    def largest_frame(self, max_width: int, max_height: int, image_bytes: int) -> tuple[int, int]:
        """Return height and width of the largest batch that a data set may give.

        Args:
            max_width: width of its widest image in pixels; 0 if that is not known.
            max_height: height of its tallest image; 0 if that is not known.
            image_bytes: bytes of a batch for each pixel of an image.

        Raises:
            ConfigError: the batch would have more than `max_bytes`, or the sizes are not known and not limited.
        """
        if self.longer is None and not (max_width and max_height):
            raise ConfigError(
                "the sizes of these images are not stored: give size=Fit(longer=...), their longest side"
            )
        height, width = self.frame(self.longer or max_height, self.longer or max_width)
        if height * width * image_bytes > self.max_bytes:
            side = int((self.max_bytes / image_bytes) ** 0.5) // self.multiple * self.multiple
            raise ConfigError(
                f"a batch may have images of {width}x{height} pixels, {height * width * image_bytes} bytes, above "
                f"max_bytes={self.max_bytes}: give a smaller batch_size, size=Fit(longer={max(side, 1)}) or less, "
                "or a larger max_bytes"
            )
        return height, width

    def check_masks(self, count: int, frame: tuple[int, int]) -> None:
        """Raise ConfigError if `count` masks of objects of the height and width of a batch exceed `max_bytes`."""
        height, width = frame
        if count * height * width > self.max_bytes:
            raise ConfigError(
                f"a batch has {count} masks of objects, of {width}x{height} pixels each with their padding: "
                f"{count * height * width} bytes, above max_bytes={self.max_bytes}. Create the loader with a smaller "
                "batch_size or Fit(longer=...), or a larger max_bytes, and load the last state"
            )

    def plan(
        self,
        widths: Integers,
        heights: Integers,
        positions: Integers,
        *,
        seed: int,
        epoch: int,
        training: bool,
        config: AugmentConfig,
    ) -> Windows:
        """Return windows of whole images with their output sizes; training flips them. See `plan_random_windows`."""
        choices = np.array(self.shorter if isinstance(self.shorter, tuple) else [self.shorter or 1], np.int64)
        index = np.full(len(positions), len(choices) - 1)
        flips = np.zeros(len(positions), np.int32)
        if training:
            index = (draw(SHORTER_STREAM, positions, seed=seed, epoch=epoch) * len(choices)).astype(np.int64)
            flips = draw_flips(positions, seed=seed, epoch=epoch, config=config)
        sizes = self.sizes(widths, heights, choices[index])
        frame = self.frame(*sizes.max(axis=0, initial=1).tolist())
        return replace(plan_whole_images(widths, heights), flips=flips, sizes=sizes, frame=frame)


def parse_size(value: Any) -> int | Fit:
    """Return the value of a loader's argument `size`, also of `ImageLoader.settings`."""
    if not isinstance(value, Mapping):
        return Fit() if value is None else value
    shorter = value.get("shorter")
    return Fit(**{**value, "shorter": tuple(shorter) if isinstance(shorter, list) else shorter})
