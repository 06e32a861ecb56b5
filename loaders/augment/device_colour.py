"""Colour changes of a complete batch with torch, for images that are decoded or normalised on a GPU.

The changes, their factors and their order are those of `colour.py`; results differ by at most one level of 255,
because sums are rounded differently. Each image has its changes in its own order, so one pass must be able to make a
different change to each image. Brightness, contrast and saturation therefore share one formula, the blend
factor * image + (1 - factor) * X. X is black for brightness, the mean grey of the image for contrast, and the grey of
each pixel for saturation. A batch needs as many passes as the image with the most changes.
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

# Kinds of changes: the numbers of `ColourFactors.sequence`, and one for no change.
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE, _NONE = range(5)
_NEUTRAL: Final = np.array([1.0, 1.0, 1.0, 0.0])  # factors that change nothing, by kind
_WHITE: Final = 255.0
_TINY: Final = float(np.finfo(np.float32).tiny)

# Function that copies an array to the device of the images.
Place = Callable[[npt.NDArray[Any]], "Tensor"]


@dataclass(frozen=True)
class ColourPass:
    """One pass over a batch, with at most one change of each image.

    Attributes:
        weights: `float32[3, n]`: weights in the blend of each image, its grey and its mean grey (black has none).
        needs_grey: whether any weight of a grey or mean grey is not 0.
        rotated: `int64[m]`, indices of the images whose hue is rotated.
        rotations: `float32[m]`, rotations as fractions of the circle.
    """

    weights: npt.NDArray[np.float32]
    needs_grey: bool
    rotated: npt.NDArray[np.int64]
    rotations: npt.NDArray[np.float32]


def plan_passes(factors: ColourFactors) -> list[ColourPass]:
    """Return the passes of a batch in order; none if all factors are neutral."""
    amounts = np.stack([factors.brightness, factors.contrast, factors.saturation, factors.hue], axis=1)  # by kind
    sequence = factors.sequence.astype(np.int64)  # [n, 4], the kinds of changes of each image, first to last
    is_neutral = np.take_along_axis(amounts == _NEUTRAL, sequence, axis=1)
    # Move the neutral changes of each image to the end, so that fewer passes are needed; the others keep their order.
    columns = np.argsort(is_neutral, axis=1, kind="stable")
    # Column p of `kinds` and `ordered_amounts`, both [n, 4], is the change of each image in pass p.
    kinds = np.take_along_axis(np.where(is_neutral, _NONE, sequence), columns, axis=1)
    ordered_amounts = np.take_along_axis(np.take_along_axis(amounts, sequence, axis=1), columns, axis=1)
    num_passes = int((~is_neutral).sum(axis=1).max(initial=0))
    return [
        _plan_pass(kinds[:, number], ordered_amounts[:, number].astype(np.float32)) for number in range(num_passes)
    ]


def _plan_pass(kinds: npt.NDArray[np.int64], amounts: npt.NDArray[np.float32]) -> ColourPass:
    """Return the pass with one change of each image: its kind, `int64[n]`, and its factor, `float32[n]`."""
    is_blend = kinds < _HUE
    # Images with a rotation or without a change have the weights 1, 0, 0, so the blend leaves them as they are.
    image_weight = np.where(is_blend, amounts, np.float32(1))
    grey_weight = 1 - image_weight
    weights = np.stack(
        [image_weight, np.where(kinds == _SATURATION, grey_weight, 0), np.where(kinds == _CONTRAST, grey_weight, 0)]
    )
    rotated = np.flatnonzero(kinds == _HUE)
    return ColourPass(weights.astype(np.float32), bool(weights[1:].any()), rotated, amounts[rotated])


def change_colours(images: Tensor, passes: Sequence[ColourPass], place: Place) -> None:
    """Change the colours of a batch in place.

    Args:
        images: `float32[n, 3, height, width]`, levels 0 to 255; whole numbers on return.
        passes: passes for these images.
        place: function that copies an array to their device.
    """
    for colour_pass in passes:
        image_weight, grey_weight, mean_weight = place(colour_pass.weights)[:, :, None, None, None].unbind()
        if colour_pass.needs_grey:
            grey = _grey(images)  # the next line changes it in place, after computing its mean
            grey_terms = grey.mean(dim=(2, 3), keepdim=True).mul(mean_weight).add(grey.mul_(grey_weight))
            images.mul_(image_weight).add_(grey_terms)
        else:
            images.mul_(image_weight)
        images.clamp_(0, _WHITE)
        if len(colour_pass.rotated):
            rotated, rotations = place(colour_pass.rotated), place(colour_pass.rotations)
            images.index_copy_(0, rotated, _rotate_hue(images.index_select(0, rotated), rotations))
    # Round once, at the end, as `colour.py` does.
    images.add_(0.5).floor_()


def _grey(images: Tensor) -> Tensor:
    """Return the grey of each pixel, `float32[n, 1, height, width]`."""
    return images[:, 0:1].mul(0.299).add_(images[:, 1:2].mul(0.587)).add_(images[:, 2:3].mul(0.114))


def _rotate_hue(images: Tensor, rotations: Tensor) -> Tensor:
    """Return images with rotated hue, and unchanged value and chroma, as `colour.py` does."""
    import torch

    red, green, blue = images.unbind(1)
    value, chroma = images.amax(1), images.amax(1) - images.amin(1)
    hue = torch.where(  # in sixths of the circle, here still multiplied by chroma
        red == value,
        green - blue,
        torch.where(green == value, blue - red + 2 * chroma, red - green + 4 * chroma),
    )
    hue = hue / chroma.clamp_min(_TINY)  # grey has no hue; it gets 0
    hue = (hue + 6 * rotations[:, None, None]).remainder(6)
    # A channel is value - fraction * chroma. As a function of hue, fraction is a trapezoid around the hue `middle`:
    # offset + slope * distance from it, limited to 0..1. The three triples are for red, green and blue.
    fractions = [
        ((hue - middle).abs() * slope + offset).clamp(0, 1)
        for middle, offset, slope in ((3, 2, -1), (2, -1, 1), (4, -1, 1))
    ]
    return torch.stack([value - fraction * chroma for fraction in fractions], dim=1)
