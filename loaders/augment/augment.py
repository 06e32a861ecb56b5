"""Random windows, flips and colour factors of images, as pure functions of (seed, epoch, position).

Widths and heights are columns of the data set, so windows are drawn before images are decoded. A resumed run draws
the same values as an uninterrupted one.

Source of the random window: Szegedy et al. 2015. Its area and the logarithm of its aspect ratio are uniform. If ten
tries do not fit into the image, a centre crop is taken, as in common implementations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers, derive_keys, uniform, uniforms

# Purposes of the keys (`derive_keys`): one number per independent use of random values. The access order and ingests
# use lower numbers.
_AUGMENTATION, _TRANSFORMS = 32, 35
_TRIES = 10  # random windows per image, of which the first that fits into the image is taken
# Numbers of the random streams of a position: four per try, then the flip, then the colours. They must never change,
# because a resumed run draws the same values again.
_AREA, _RATIO, _LEFT, _TOP, _STREAMS_PER_TRY = 0, 1, 2, 3, 4
_FLIP = _TRIES * _STREAMS_PER_TRY
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE, _SEQUENCE = range(_FLIP + 1, _FLIP + 6)
SHORTER_STREAM: Final = _FLIP + 6
"""The stream of `draw` for the shorter side of an image, see `Fit`."""
MOSAIC_STREAMS: Final = range(_FLIP + 7, _FLIP + 11)
"""The streams of `draw` for a mosaic: whether there is one, the sequence of its images, x and y of their centre."""
# All orders of the four colour changes; a random value of the stream `_SEQUENCE` selects one of them.
_SEQUENCES: Final = np.array(list(permutations(range(4))), np.int8)

Evaluation = Literal["torchvision", "window", "whole"]


Image = npt.NDArray[np.uint8]
# (image `uint8[height, width, 3]`, generator) -> image of the same shape and dtype, which may be the argument itself,
# changed in place. Called from several threads in parallel, after crop, scaling, flip and colour changes.
Transform: TypeAlias = Callable[[Image, np.random.Generator], Image]


@dataclass(frozen=True)
class AugmentConfig:
    """Crops, flips and colour changes of images: random in training; evaluation crops the centre.

    Attributes:
        scale: range of the window's area as a fraction of the image's area, 0 < low <= high <= 1.
        ratio: range of width / height of the window, 0 < low <= high.
        flip: probability of a horizontal flip.
        brightness: spread b of the brightness factor, drawn from [max(0, 1 - b), 1 + b]; 0: no change.
        contrast: spread of the contrast factor, as for brightness.
        saturation: spread of the saturation factor, as for brightness.
        hue: the hue is rotated by a value from [-hue, hue], as a fraction of the full circle; at most 0.5.
        resize: evaluation only: shorter side before the centre crop, in pixels, at least the loader's `size`; None:
            `size` * 256 / 224.
        evaluation: how evaluation scales and crops. "torchvision": as torchvision's `Resize(resize)`, bilinear and
            anti-aliased, and `CenterCrop(size)`, with which accuracies are usually measured. "window": a window of
            whole source pixels is scaled; faster, less exact, and the value for saved states without this field.
            "whole": the whole image is scaled to a square, which loses no box; its sides are distorted.
        mosaic: probability of a mosaic in training: the output shows parts of four images, its own sample's and those
            of its group, with their objects and masks. Groups are positions 0..3, 4..7 and so on, so `batch_size`
            must be a multiple of 4. Only for loaders with objects or masks.
        mosaic_epochs: number of the first epochs, which have mosaics; None: all. Often the last ones have none.
        transform: function for training and evaluation. Any thread may call it, once per image. Its arguments are the
            cropped and flipped `uint8[height, width, 3]`, and a random generator, see `generators`. It returns an
            array of the same shape and dtype, which may be its argument.

    Raises:
        ConfigError: a value is out of range.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    resize: int | None = None
    evaluation: Evaluation = "torchvision"
    mosaic: float = 0.0
    mosaic_epochs: int | None = None
    transform: Transform | None = None

    def __post_init__(self) -> None:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ConfigError(f"scale is {self.scale}; expected 0 < low <= high <= 1")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ConfigError(f"ratio is {self.ratio}; expected 0 < low <= high")
        for name in ("flip", "mosaic"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a probability, 0 to 1")
        if self.mosaic_epochs is not None and self.mosaic_epochs < 0:
            raise ConfigError(f"mosaic_epochs is {self.mosaic_epochs}; expected 0 or more, or None for all epochs")
        for name in ("brightness", "contrast", "saturation"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a number of 0 or more")
        if not 0 <= self.hue <= 0.5:
            raise ConfigError(f"hue is {self.hue}; expected a fraction of the circle, 0 to 0.5")
        parse_evaluation(self.evaluation)

    @property
    def changes_colours(self) -> bool:
        """Whether any colour change has a non-zero spread."""
        return any((self.brightness, self.contrast, self.saturation, self.hue))


@dataclass(frozen=True)
class Windows:
    """Windows of a batch: the rectangles that are cut from its images, in pixels.

    Attributes:
        starts: `int32[batch, 2]`, top and left.
        shapes: `int32[batch, 2]`, height and width.
        flips: `int32[batch]`, 1 where the window is mirrored.
        boxes: `float64[batch, 4]`, left, top, right and bottom of the part of each window that is scaled to the
            output, relative to the window. The filter also reads pixels of the window outside of the box. None: each
            window is scaled as a whole.
        regions: `float64[batch, 6]`, for images whose size only the thread that decodes them learns: left, top, right
            and bottom of the scaled part in pixels of another image of the same scene, and the width and height of
            that image. A row of NaN stands for an image with a window as above. None: all images have one.
        sizes: `int32[batch, 2]`, height and width of the output of each image, at the top left of its frame; None:
            all have the size of the loader.
        frame: height and width of the batch, see `Fit`; None without `sizes`.
    """

    starts: npt.NDArray[np.int32]
    shapes: npt.NDArray[np.int32]
    flips: npt.NDArray[np.int32]
    boxes: npt.NDArray[np.float64] | None = None
    regions: npt.NDArray[np.float64] | None = None
    sizes: npt.NDArray[np.int32] | None = None
    frame: tuple[int, int] | None = None

    def select(self, indices: Sequence[int] | Integers) -> Windows:
        """Return the windows of some images of the batch."""
        chosen: dict[str, Any] = {
            name: part[indices] for name, part in vars(self).items() if isinstance(part, np.ndarray)
        }
        return replace(self, **chosen)

    @property
    def scaled(self) -> npt.NDArray[np.float64]:
        """The part of each image that becomes the output: `float64[batch, 4]`, left, top, right, bottom in pixels."""
        corner = np.tile(self.starts[:, ::-1].astype(np.float64), 2)
        if self.boxes is not None:
            return corner + self.boxes
        corner[:, 2:] += self.shapes[:, ::-1]
        return corner

    def repeat(self, widths: npt.NDArray[Any], heights: npt.NDArray[Any], count: int) -> Windows:
        """Return these windows, and `count - 1` times more for other images of the same samples, of any size.

        Args:
            widths: widths of the images of these windows in pixels, `int[batch]`.
            heights: their heights.
            count: number of images of a sample.
        """
        region = np.concatenate([self.scaled, np.stack([widths, heights], axis=1)], axis=1)
        own = np.full(region.shape, np.nan)
        boxes = None if self.boxes is None else np.tile(self.boxes, (count, 1))
        regions = np.concatenate([own, *[region] * (count - 1)])
        starts, shapes = np.tile(self.starts, (count, 1)), np.tile(self.shapes, (count, 1))
        sizes = None if self.sizes is None else np.tile(self.sizes, (count, 1))
        return Windows(starts, shapes, np.tile(self.flips, count), boxes, regions, sizes, self.frame)


@dataclass(frozen=True)
class ColourFactors:
    """Colour factors of a batch; a slice `factors[start:stop]` returns those of some of its images.

    Attributes:
        brightness, contrast, saturation: `float64[batch]`, 1: no change.
        hue: `float64[batch]`, rotation as a fraction of the circle, 0: no change.
        sequence: `int8[batch, 4]`, order of the changes: 0 brightness, 1 contrast, 2 saturation, 3 hue.
    """

    brightness: npt.NDArray[np.float64]
    contrast: npt.NDArray[np.float64]
    saturation: npt.NDArray[np.float64]
    hue: npt.NDArray[np.float64]
    sequence: npt.NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.sequence)

    def __getitem__(self, rows: slice) -> ColourFactors:
        return ColourFactors(
            self.brightness[rows], self.contrast[rows], self.saturation[rows], self.hue[rows], self.sequence[rows]
        )


def parse_choice(value: object, choices: Sequence[Any], name: str) -> Any:
    """Return the one of some choices that equals a value. Raises ConfigError: none does; `name` is the setting's."""
    for choice in choices:
        if value == choice:
            return choice
    raise ConfigError(f"{name} is {value!r}; expected one of {', '.join(choices)}")


def parse_evaluation(value: object) -> Evaluation:
    """Return the kind of evaluation of that name. Raises ConfigError: there is none."""
    evaluation: Evaluation = parse_choice(value, get_args(Evaluation), "evaluation")
    return evaluation


def plan_random_windows(
    widths: npt.NDArray[Any],
    heights: npt.NDArray[Any],
    positions: Integers,
    *,
    seed: int,
    epoch: int,
    config: AugmentConfig,
) -> Windows:
    """Draw a training window for each sample.

    Args:
        widths: widths of the images in pixels, `int[batch]`.
        heights: heights of the images in pixels, `int[batch]`.
        positions: positions of the samples in the epoch, `int64[batch]`.
        seed: seed of the access order.
        epoch: epoch of the access order.
        config: distribution of the windows.
    """
    key = derive_keys(seed, epoch, _AUGMENTATION, 1)[0]
    image_w, image_h = widths.astype(np.float64), heights.astype(np.float64)
    # All tries of all samples are drawn at once, and the first that fits is taken; this avoids a loop over samples.
    # Arrays of tries are `float64[_TRIES, batch]`.
    drawn = uniforms(key, positions, _FLIP + 1)
    tries = drawn[:_FLIP].reshape(_TRIES, _STREAMS_PER_TRY, len(positions))
    area = image_w * image_h * _between(tries[:, _AREA], *config.scale)
    ratio = np.exp(_between(tries[:, _RATIO], *np.log(config.ratio)))
    width, height = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = (width >= 1) & (height >= 1) & (width <= image_w) & (height <= image_h)
    left = np.floor(tries[:, _LEFT] * (image_w - width + 1))
    top = np.floor(tries[:, _TOP] * (image_h - height + 1))
    first_fit = np.argmax(fits, axis=0)  # by sample; 0 where no try fits
    chosen = np.stack([top, left, height, width])[:, first_fit, np.arange(len(positions))]
    window = np.where(fits.any(axis=0), chosen, _plan_fallback_windows(image_w, image_h, config))
    return _make_windows(window, (drawn[_FLIP] < config.flip).astype(np.int32))


def draw(stream: int, positions: Integers, *, seed: int, epoch: int) -> npt.NDArray[np.float64]:
    """Return a random value of each sample, 0 to 1, for one purpose; see `plan_random_windows`."""
    return uniform(derive_keys(seed, epoch, _AUGMENTATION, 1)[0], positions, stream)


def draw_flips(positions: Integers, *, seed: int, epoch: int, config: AugmentConfig) -> npt.NDArray[np.int32]:
    """Return the flip of each sample, as `plan_random_windows` draws it."""
    return (draw(_FLIP, positions, seed=seed, epoch=epoch) < config.flip).astype(np.int32)


def plan_colours(positions: Integers, *, seed: int, epoch: int, config: AugmentConfig) -> ColourFactors:
    """Draw the colour factors of each sample; for the arguments see `plan_random_windows`.

    The ranges and the random order of the four changes are those of torchvision's `ColorJitter`.
    """

    def factor(stream: int, spread: float) -> npt.NDArray[np.float64]:
        return _between(draw(stream, positions, seed=seed, epoch=epoch), max(0.0, 1 - spread), 1 + spread)

    sequence_index = (draw(_SEQUENCE, positions, seed=seed, epoch=epoch) * len(_SEQUENCES)).astype(np.int64)
    return ColourFactors(
        brightness=factor(_BRIGHTNESS, config.brightness),
        contrast=factor(_CONTRAST, config.contrast),
        saturation=factor(_SATURATION, config.saturation),
        hue=_between(draw(_HUE, positions, seed=seed, epoch=epoch), -config.hue, config.hue),
        sequence=_SEQUENCES[sequence_index],
    )


def generators(seed: int, epoch: int, positions: Integers) -> list[np.random.Generator]:
    """Return a random generator for each sample, for users' transforms; for arguments see `plan_random_windows`.

    A generator depends on (seed, epoch, position) only.
    """
    key = derive_keys(seed, epoch, _TRANSFORMS, 2)
    counters = np.zeros((len(positions), 4), np.uint64)
    # The position is the third of the four 64-bit words of the Philox counter (Salmon et al., SC 2011). So the
    # sequences of two samples are at least 2**128 blocks apart, and do not overlap.
    counters[:, 2] = positions
    return [np.random.Generator(np.random.Philox(key=key, counter=counter)) for counter in counters]


def plan_centre_windows(widths: npt.NDArray[Any], heights: npt.NDArray[Any], *, size: int, resize: int) -> Windows:
    """Return the windows of an evaluation, which have no flips.

    A window scaled to `size` equals a resize of the image's shorter side to `resize` and a crop of the centre.

    Args:
        widths: widths of the images in pixels, `int[batch]`.
        heights: heights of the images in pixels, `int[batch]`.
        size: side of the output in pixels.
        resize: shorter side before the crop in pixels, at least `size`.
    """
    side = np.maximum(1, np.rint(np.minimum(widths, heights).astype(np.float64) * size / resize))
    top, left = np.rint((heights - side) / 2), np.rint((widths - side) / 2)
    return _make_windows(np.stack([top, left, side, side]), np.zeros(len(widths), np.int32))


def plan_centre_boxes(widths: npt.NDArray[Any], heights: npt.NDArray[Any], *, size: int, resize: int) -> Windows:
    """Return windows with boxes that, scaled to `size`, are torchvision's `Resize(resize)` and `CenterCrop(size)`.

    A window has all pixels that the anti-aliased bilinear filter of the resize reads for the crop, so the image need
    not be decoded or scaled as a whole. For the arguments see `plan_centre_windows`.
    """
    # A stored width or height of 0 is wrong. Count it as 1, which gives a window that the decoder refuses.
    source = np.maximum(np.stack([widths, heights], axis=1).astype(np.float64), 1)
    # As torchvision, round the longer side down, and the start of the crop to the nearest number (half to even).
    scaled = np.floor(resize * source / source.min(axis=1, keepdims=True))
    first = np.rint((scaled - size) / 2)
    factor = source / scaled  # source pixels of one scaled pixel
    start, stop = first * source / scaled, (first + size) * source / scaled
    # The filter of the first or last scaled pixel reads this far beyond `start` or `stop`. The 1 is for rounding.
    reach = np.maximum(factor, 1) - factor / 2 + 1
    low, high = np.maximum(np.floor(start - reach), 0), np.minimum(np.ceil(stop + reach), source)
    window = np.stack([low[:, 1], low[:, 0], high[:, 1] - low[:, 1], high[:, 0] - low[:, 0]])
    windows = _make_windows(window, np.zeros(len(source), np.int32))
    return replace(windows, boxes=np.concatenate([start - low, stop - low], axis=1))


def plan_whole_images(widths: npt.NDArray[Any], heights: npt.NDArray[Any]) -> Windows:
    """Return windows of whole images, without flips; `widths` and `heights` are `int[batch]`, in pixels."""
    zeros = np.zeros(len(widths))
    # A stored width or height of 0 is wrong. Count it as 1, as `plan_centre_boxes` does.
    sides = np.maximum(np.stack([zeros, zeros, heights, widths]), [[0], [0], [1], [1]])
    return _make_windows(sides, np.zeros(len(widths), np.int32))


def place_region(
    region: Sequence[float], width: int, height: int, *, size: int, has_margin: bool
) -> tuple[tuple[int, int], tuple[int, int], tuple[float, float, float, float] | None]:
    """Return the window of an image by the region of another image of the same scene.

    Both images show the same scene from edge to edge, so fractions of their sides are equal.

    Args:
        region: a row of `Windows.regions`.
        width: width of the image in pixels.
        height: its height.
        size: side of the output in pixels.
        has_margin: whether the window has all pixels that the filter reads, as in `plan_centre_boxes`; otherwise no
            more than those that the region touches.

    Returns:
        Top and left, height and width, and the box to scale; None for the box: the whole window.
    """
    starts, shapes, box = [], [], []
    for low, high, of, side in ((region[0], region[2], region[4], width), (region[1], region[3], region[5], height)):
        start, stop = low * (side / of), high * (side / of)  # for equal sizes, the factor is exactly 1
        factor = (stop - start) / size
        reach = max(factor, 1) - factor / 2 + 1 if has_margin else 0
        first = min(max(math.floor(start - reach), 0), side - 1)
        last = max(min(math.ceil(stop + reach), side), first + 1)
        starts.append(first)
        shapes.append(last - first)
        box.append((max(start - first, 0.0), min(stop - first, float(last - first))))
    is_whole = all(low == 0 and high == side for (low, high), side in zip(box, shapes, strict=True))
    scaled = None if is_whole and not has_margin else (box[0][0], box[1][0], box[0][1], box[1][1])
    return (starts[1], starts[0]), (shapes[1], shapes[0]), scaled


def _plan_fallback_windows(
    image_w: npt.NDArray[np.float64], image_h: npt.NDArray[np.float64], config: AugmentConfig
) -> npt.NDArray[np.float64]:
    """Return the largest centred window with an allowed ratio: `float64[4, batch]`, top, left, height, width."""
    ratio = np.clip(image_w / image_h, *config.ratio)
    width = np.clip(np.rint(np.minimum(image_w, image_h * ratio)), 1, image_w)
    height = np.clip(np.rint(np.minimum(image_h, image_w / ratio)), 1, image_h)
    return np.stack([np.floor((image_h - height) / 2), np.floor((image_w - width) / 2), height, width])


def _make_windows(window: npt.NDArray[np.float64], flips: npt.NDArray[np.int32]) -> Windows:
    """Return windows from `float64[4, batch]`: top, left, height, width."""
    pixels = np.ascontiguousarray(window.T.astype(np.int32))
    return Windows(np.ascontiguousarray(pixels[:, :2]), np.ascontiguousarray(pixels[:, 2:]), flips)


def _between(fraction: npt.NDArray[np.float64], low: float, high: float) -> npt.NDArray[np.float64]:
    return low + fraction * (high - low)


# A transform gets a random generator that depends on (seed, epoch, position) only. So it draws the same numbers after
# a resume, in a batch of any size, on any rank and in any thread.


def apply_transform(transform: Transform, image: Image, generator: np.random.Generator) -> None:
    """Replace an image, `uint8[height, width, 3]`, in place by the result of a transform.

    Errors that the transform raises are passed on unchanged.

    Raises:
        ConfigError: the transform does not return an array of the image's shape and dtype.
    """
    changed = transform(image, generator)
    if changed is image:
        return
    if not isinstance(changed, np.ndarray) or (changed.shape, changed.dtype) != (image.shape, image.dtype):
        actual = (
            f"{changed.dtype}{list(changed.shape)}" if isinstance(changed, np.ndarray) else type(changed).__name__
        )
        raise ConfigError(f"transform returned {actual}; expected a NumPy array, uint8{list(image.shape)}")
    np.copyto(image, changed)
