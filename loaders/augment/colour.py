"""Colour changes of decoded images on the CPU: brightness, contrast, saturation and hue, by given factors.

The four changes, their neutral factors and their random order are those of torchvision's `ColorJitter` (its
`adjust_brightness`, `adjust_contrast`, `adjust_saturation` and `adjust_hue`). The first three blend the image with
black, with its mean grey, and with each pixel's own grey. The last one rotates the hue in HSV. Results are clipped to
the range of a pixel. Grey is 0.299 R + 0.587 G + 0.114 B (ITU-R BT.601).

torchvision truncates to integers after each change, which darkens images. This module rounds once at the end, so its
images differ from torchvision's by a few levels.
"""

from __future__ import annotations

import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from datasvc.loaders.augment.augment import ColourFactors

_Floats = npt.NDArray[np.float32]
_GREY: Final = np.array([[0.299], [0.587], [0.114]], np.float32)
_WHITE: Final = np.float32(255)
_NEUTRAL: Final = (1.0, 1.0, 1.0, 0.0)  # factors that change nothing, by change number
_NUM_SCRATCH = 4  # number of scratch planes that `_rotate_hue` needs; the other changes need fewer
# Keeps one `_ColourChanger` per thread, because creating one takes longer than changing an image.
_THREAD_LOCAL: Final = threading.local()


class _ColourChanger:
    """Changes the colours of images of one size, in scratch memory that fits into a core's cache."""

    def __init__(self, height: int, width: int) -> None:
        self.size = (height, width)
        memory = np.empty((3 + _NUM_SCRATCH, height * width), np.float32)
        self._planes, self._scratch = memory[:3], memory[3:]
        self._bytes = np.empty((3, height, width), np.uint8)

    def change(self, image: npt.NDArray[np.uint8], factors: ColourFactors, index: int) -> None:
        """Change an image, `uint8[height, width, 3]` with any strides, in place, by the factors at `index`."""
        amounts = (factors.brightness[index], factors.contrast[index], factors.saturation[index], factors.hue[index])
        changes = [number for number in factors.sequence[index].tolist() if amounts[number] != _NEUTRAL[number]]
        if not changes:
            return
        planes = self._planes.reshape(self._bytes.shape)
        planes[:] = image.transpose(2, 0, 1)
        for number in changes:
            _CHANGES[number](self._planes, np.float32(amounts[number]), self._scratch)
        self._planes += np.float32(0.5)
        np.copyto(self._bytes, planes, casting="unsafe")  # truncates; with the 0.5 added, this rounds
        for channel, values in enumerate(self._bytes):  # three times as fast as one copy of all channels
            image[:, :, channel] = values


def augment_colour(images: npt.NDArray[np.uint8], factors: ColourFactors) -> None:
    """Change the colours of images in place; each result depends only on the image's pixels and factors.

    Images are `uint8[n, height, width, 3]` with any strides, and each has one element of `factors`. Several threads
    may process parts of a batch in parallel. A change with a neutral factor costs nothing.
    """
    assert len(images) == len(factors), (len(images), len(factors))
    height, width = images.shape[1:3]
    changer: _ColourChanger | None = getattr(_THREAD_LOCAL, "changer", None)
    if changer is None or changer.size != (height, width):
        _THREAD_LOCAL.changer = changer = _ColourChanger(height, width)
    for index, image in enumerate(images):
        changer.change(image, factors, index)


def _change_brightness(planes: _Floats, factor: np.float32, _: _Floats) -> None:
    planes *= factor
    np.minimum(planes, _WHITE, out=planes)


def _change_contrast(planes: _Floats, factor: np.float32, scratch: _Floats) -> None:
    mean = _grey(planes, scratch).mean(dtype=np.float64)
    planes *= factor
    planes += np.float32((1 - factor) * mean)
    _clip(planes)


def _change_saturation(planes: _Floats, factor: np.float32, scratch: _Floats) -> None:
    grey = _grey(planes, scratch)
    grey *= 1 - factor
    planes *= factor
    planes += grey
    _clip(planes)


def _rotate_hue(planes: _Floats, rotation: np.float32, scratch: _Floats) -> None:
    """Rotate the hue of HSV, and keep value (the largest channel) and saturation.

    Chroma is the largest minus the smallest channel.
    Source of the hue hexagon: Smith, Color gamut transform pairs, SIGGRAPH 1978.
    """
    value, chroma, hue, weight = scratch
    np.max(planes, axis=0, out=value)
    np.min(planes, axis=0, out=chroma)
    np.subtract(value, chroma, out=chroma)
    _compute_hue(planes, value, chroma, hue, weight)
    hue += 6 * rotation
    hue -= 6 * np.floor(hue / 6)  # back to the range 0..6
    # A channel is value - weight * chroma. As a function of hue, weight is a trapezoid: offset + slope * distance
    # from the middle, limited to 0..1. The three triples are for red, green and blue.
    for plane, (middle, offset, slope) in zip(planes, ((3, 2, -1), (2, -1, 1), (4, -1, 1)), strict=True):
        np.subtract(hue, middle, out=weight)
        np.abs(weight, out=weight)
        weight *= slope
        weight += offset
        np.maximum(weight, 0, out=weight)
        np.minimum(weight, 1, out=weight)
        weight *= chroma
        np.subtract(value, weight, out=plane)


def _compute_hue(planes: _Floats, value: _Floats, chroma: _Floats, hue: _Floats, scratch: _Floats) -> None:
    """Write the hue, -1 to 5, to `hue`: the difference of the two smaller channels / chroma, plus 0, 2 or 4.

    The largest channel selects the number that is added: 0 for red, 2 for green, 4 for blue. If channels are equal,
    red counts as larger than green, and green as larger than blue.
    """
    red, green, blue = planes
    # First treat blue as the largest channel of all pixels. Then overwrite the pixels where green or red is larger.
    np.subtract(red, green, out=hue)
    hue += 4 * chroma
    for largest, first, second, sector in ((green, blue, red, 2), (red, green, blue, 0)):
        np.subtract(first, second, out=scratch)
        if sector:
            scratch += sector * chroma
        np.copyto(hue, scratch, where=largest == value)
    hue /= np.maximum(chroma, np.finfo(np.float32).tiny)  # grey has no hue; it gets 0


def _grey(planes: _Floats, scratch: _Floats) -> _Floats:
    """Return the grey of each pixel, stored in `scratch`."""
    # Use sums: the last bit of a matrix product differs between machines.
    terms = np.multiply(planes, _GREY, out=scratch[:3])
    terms[0] += terms[1]
    terms[0] += terms[2]
    grey: _Floats = terms[0]
    return grey


def _clip(planes: _Floats) -> None:
    np.maximum(planes, 0, out=planes)
    np.minimum(planes, _WHITE, out=planes)


# Functions, indexed by the change numbers of `ColourFactors.sequence`.
_CHANGES: Final = (_change_brightness, _change_contrast, _change_saturation, _rotate_hue)
