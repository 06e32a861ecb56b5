"""Colours of a whole batch, changed by torch where it lies: for images that are decoded, or normalised, on a GPU.

The changes, their factors and their order are those of `colour.py`; results differ by a level of 255 at most, where
sums round otherwise. Three of the changes are one: a blend of the image, its grey and its mean grey. So a batch takes
as many passes as an image has changes, though every image has them in an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from datasvc.loaders.augment.augment import ColourFactors

if TYPE_CHECKING:
    from torch import Tensor

_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE, _NONE = range(5)  # as in `ColourFactors.sequence`
_NEUTRAL: Final = np.array([1.0, 1.0, 1.0, 0.0])
_WHITE: Final = 255.0
_TINY: Final = float(np.finfo(np.float32).tiny)

# Copies an array to the device of the images.
Place = Callable[[npt.NDArray[Any]], "Tensor"]


@dataclass(frozen=True)
class ColourPass:
    """What is done to the images of a batch at once, at most one change to each.

    Attributes:
        weights: `float32[3, n]`, of the image, its grey and its mean grey in the blend.
        needs_grey: whether any image is blended with one of the two.
        turned: `int64[m]`, images whose hue is turned.
        turns: `float32[m]`, shares of the circle.
    """

    weights: npt.NDArray[np.float32]
    needs_grey: bool
    turned: npt.NDArray[np.int64]
    turns: npt.NDArray[np.float32]


def plan_passes(factors: ColourFactors) -> list[ColourPass]:
    """Return the passes of a batch, in order: none where all factors are neutral."""
    amounts = np.stack([factors.brightness, factors.contrast, factors.saturation, factors.hue], axis=1)
    sequence = factors.sequence.astype(np.int64)
    is_neutral = np.take_along_axis(amounts == _NEUTRAL, sequence, axis=1)
    # The changes of each image move to the front, in their order: fewer passes where some are neutral.
    order = np.argsort(is_neutral, axis=1, kind="stable")
    kinds = np.take_along_axis(np.where(is_neutral, _NONE, sequence), order, axis=1)
    drawn = np.take_along_axis(np.take_along_axis(amounts, sequence, axis=1), order, axis=1)
    num_passes = int((~is_neutral).sum(axis=1).max(initial=0))
    return [_plan_pass(kinds[:, number], drawn[:, number].astype(np.float32)) for number in range(num_passes)]


def _plan_pass(kinds: npt.NDArray[np.int64], amounts: npt.NDArray[np.float32]) -> ColourPass:
    is_blend = kinds < _HUE
    own = np.where(is_blend, amounts, np.float32(1))
    rest = 1 - own
    weights = np.stack([own, np.where(kinds == _SATURATION, rest, 0), np.where(kinds == _CONTRAST, rest, 0)])
    turned = np.flatnonzero(kinds == _HUE)
    return ColourPass(weights.astype(np.float32), bool(weights[1:].any()), turned, amounts[turned])


def change_colours(images: Tensor, passes: Sequence[ColourPass], place: Place) -> None:
    """Change the colours of a batch in place.

    Args:
        images: `float32[n, 3, height, width]`, levels 0 to 255; whole numbers again when this returns.
        passes: of these images.
        place: copies an array to their device.
    """
    for step in passes:
        own, grey_weight, mean_weight = place(step.weights)[:, :, None, None, None].unbind()
        if step.needs_grey:
            grey = _grey(images)
            blend = grey.mean(dim=(2, 3), keepdim=True).mul(mean_weight).add(grey.mul_(grey_weight))
            images.mul_(own).add_(blend)
        else:
            images.mul_(own)
        images.clamp_(0, _WHITE)
        if len(step.turned):
            turned = place(step.turned)
            images.index_copy_(0, turned, _turn_hue(images.index_select(0, turned), place(step.turns)))
    # Rounded once, as by `colour.py`.
    images.add_(0.5).floor_()


def _grey(images: Tensor) -> Tensor:
    """Return each pixel's grey, `float32[n, 1, height, width]`."""
    return images[:, 0:1].mul(0.299).add_(images[:, 1:2].mul(0.587)).add_(images[:, 2:3].mul(0.114))


def _turn_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Return images with their hue turned and value and chroma kept, as `colour.py` does."""
    import torch

    red, green, blue = images.unbind(1)
    value, chroma = images.amax(1), images.amax(1) - images.amin(1)
    hue = torch.where(
        red == value,
        green - blue,
        torch.where(green == value, blue - red + 2 * chroma, red - green + 4 * chroma),
    )
    hue = hue / chroma.clamp_min(_TINY)  # grey has no hue: 0
    hue = (hue + 6 * turns[:, None, None]).remainder(6)
    # How much of the chroma a channel lacks, a trapezium over the hexagon: (its middle, height there, slope).
    lacking = [
        ((hue - middle).abs() * slope + height).clamp(0, 1)
        for middle, height, slope in ((3, 2, -1), (2, -1, 1), (4, -1, 1))
    ]
    return torch.stack([value - share * chroma for share in lacking], dim=1)
