"""Colours of decoded images: brightness, contrast, saturation and hue, by factors that were drawn beforehand.

The four changes, their neutral factors and their random order are those of torchvision's `ColorJitter` (its
`adjust_brightness`, `adjust_contrast`, `adjust_saturation` and `adjust_hue`): a blend with black, with the image's
mean grey, with each pixel's own grey, and a turn of the hue in HSV, each cut to the range of a pixel. Grey is
0.299 R + 0.587 G + 0.114 B (ITU-R BT.601). torchvision cuts off fractions after each change; here they are kept to
the end and rounded once, so images differ from its own by a few levels and are not darkened by the cuts.
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
_NEUTRAL: Final = (1.0, 1.0, 1.0, 0.0)  # factors that change nothing
_NUM_SCRATCH = 4  # planes that a change may use beside the image's own
_OF_THREAD: Final = threading.local()  # its changer: memory that is used for the first time costs more than the rest


class _ColourChanger:
    """Changes the colours of one image after another, in memory of its own: that much stays in a core's cache.

    Args:
        height: of every image, pixels.
        width: likewise.
    """

    def __init__(self, height: int, width: int) -> None:
        self.size = (height, width)
        memory = np.empty((3 + _NUM_SCRATCH, height * width), np.float32)
        self._planes, self._scratch = memory[:3], memory[3:]
        self._bytes = np.empty((3, height, width), np.uint8)

    def change(self, image: npt.NDArray[np.uint8], factors: ColourFactors, index: int) -> None:
        """Change `image`, `uint8[height, width, 3]` of any strides, in place, by factors `index` of a batch."""
        amounts = (factors.brightness[index], factors.contrast[index], factors.saturation[index], factors.hue[index])
        wanted = [number for number in factors.sequence[index].tolist() if amounts[number] != _NEUTRAL[number]]
        if not wanted:
            return
        planes = self._planes.reshape(self._bytes.shape)
        planes[:] = image.transpose(2, 0, 1)
        for number in wanted:
            _CHANGES[number](self._planes, np.float32(amounts[number]), self._scratch)
        self._planes += np.float32(0.5)
        np.copyto(self._bytes, planes, casting="unsafe")  # cuts off what is behind the point
        for channel, values in enumerate(self._bytes):  # three times as fast as all at once
            image[:, :, channel] = values


def augment_colour(images: npt.NDArray[np.uint8], factors: ColourFactors) -> None:
    """Change the colours of images in place; a pure function of the pixels and the factors of each.

    Several threads may each do a part of a batch at once. A change whose factor is neutral costs nothing.

    Args:
        images: `uint8[n, height, width, 3]`, of any strides.
        factors: of `n` images.
    """
    assert len(images) == len(factors), (len(images), len(factors))
    height, width = images.shape[1:3]
    changer: _ColourChanger | None = getattr(_OF_THREAD, "changer", None)
    if changer is None or changer.size != (height, width):
        _OF_THREAD.changer = changer = _ColourChanger(height, width)
    for index, image in enumerate(images):
        changer.change(image, factors, index)


def _change_brightness(planes: _Floats, factor: np.float32, _: _Floats) -> None:
    planes *= factor
    np.minimum(planes, _WHITE, out=planes)


def _change_contrast(planes: _Floats, factor: np.float32, scratch: _Floats) -> None:
    mean = _grey(planes, scratch).mean(dtype=np.float64)
    planes *= factor
    planes += np.float32((1 - factor) * mean)
    _cut(planes)


def _change_saturation(planes: _Floats, factor: np.float32, scratch: _Floats) -> None:
    grey = _grey(planes, scratch)
    grey *= 1 - factor
    planes *= factor
    planes += grey
    _cut(planes)


def _turn_hue(planes: _Floats, turn: np.float32, scratch: _Floats) -> None:
    """Turn the hue and keep the rest of HSV: value, and with it chroma, the largest less the smallest channel.

    Source of the hexagon: Smith, Color gamut transform pairs, SIGGRAPH 1978.
    """
    value, chroma, hue, weight = scratch
    np.max(planes, axis=0, out=value)
    np.min(planes, axis=0, out=chroma)
    np.subtract(value, chroma, out=chroma)
    _read_hue(planes, value, chroma, hue, weight)
    hue += 6 * turn
    hue -= 6 * np.floor(hue / 6)
    # How much of the chroma a channel lacks, a trapezium over the hexagon: (its middle, height there, slope).
    for plane, (middle, height, slope) in zip(planes, ((3, 2, -1), (2, -1, 1), (4, -1, 1)), strict=True):
        np.subtract(hue, middle, out=weight)
        np.abs(weight, out=weight)
        weight *= slope
        weight += height
        np.maximum(weight, 0, out=weight)
        np.minimum(weight, 1, out=weight)
        weight *= chroma
        np.subtract(value, weight, out=plane)


def _read_hue(planes: _Floats, value: _Floats, chroma: _Floats, hue: _Floats, scratch: _Floats) -> None:
    """Write the hue, -1 to 5, into `hue`: (a - b) / chroma + 0, 2 or 4, by which channel is the largest."""
    red, green, blue = planes
    np.subtract(red, green, out=hue)
    hue += 4 * chroma
    for largest, first, second, sector in ((green, blue, red, 2), (red, green, blue, 0)):
        np.subtract(first, second, out=scratch)
        if sector:
            scratch += sector * chroma
        np.copyto(hue, scratch, where=largest == value)
    hue /= np.maximum(chroma, np.finfo(np.float32).tiny)  # grey has no hue: 0


def _grey(planes: _Floats, scratch: _Floats) -> _Floats:
    """Return each pixel's grey, in `scratch`. Matrix products differ in the last bit among machines."""
    terms = np.multiply(planes, _GREY, out=scratch[:3])
    terms[0] += terms[1]
    terms[0] += terms[2]
    grey: _Floats = terms[0]
    return grey


def _cut(planes: _Floats) -> None:
    np.maximum(planes, 0, out=planes)
    np.minimum(planes, _WHITE, out=planes)


_CHANGES: Final = (_change_brightness, _change_contrast, _change_saturation, _turn_hue)  # as in `sequence`
