"""Boxes, keypoints and polygons of samples: through the window and flip of their image, into pixels of the output.

Coordinates are continuous: the left edge of an image of `w` pixels is 0, its right edge is `w`, and the centre of the
first pixel is 0.5. So a flip maps `x` to `w - x`, without the `- 1` that pixel numbers would need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from datasvc.errors import BadSampleError, ConfigError
from datasvc.keyed_random import Integers
from datasvc.shards.images.run_lengths import decode_runs

Floats = npt.NDArray[np.float64]
OnBadBox = Literal["drop", "mask", "raise"]
_MAX_MASK_BYTES: Final = 1 << 30  # of a sample
_FAR: Final = 1e12  # pixels: further away, no number of a crossing is right
_NO_AREA: Final = "lies outside the image or has no area"


@dataclass(frozen=True)
class ObjectConfig:
    """How the boxes and keypoints of a sample are treated.

    Attributes:
        columns: further columns with one number per object, such as ("box_labels", "box_crowd"); they lose the values
            of the boxes that are dropped. None: `box_labels`, if the data set has it.
        min_visible: share of a box's area in the image that must be inside the window, 0 to 1; a box with less is
            dropped. A box that does not touch the window is always dropped. 1 keeps the boxes that are not cut.
        min_side: sides that a clipped box must have, in pixels of the output.
        on_bad: treatment of boxes that lie outside of their image, have no area, or are not finite: "drop" them and
            count them in `ImageLoader.num_bad_boxes`; "mask" the sample, as one that does not decode; or "raise" an
            error. A list of another length or form makes a sample bad, see `DecodeConfig.on_bad`.
        num_keypoints: keypoints of an object; None: taken from the type of the column.
        flip_pairs: keypoints that change places at a flip, as pairs of numbers from 0, such as the left eye and the
            right eye. Required if keypoints are flipped; () if none do.
        fit_to_masks: with masks of objects, boxes are those around the pixels that the output shows, and an object
            without any is dropped. Otherwise a window can show a corner of a box in which there is nothing of it.

    Raises:
        ConfigError: a value is out of range.
    """

    columns: tuple[str, ...] | None = None
    min_visible: float = 0.1
    min_side: float = 0.0
    on_bad: OnBadBox = "drop"
    num_keypoints: int | None = None
    flip_pairs: tuple[tuple[int, int], ...] | None = None
    fit_to_masks: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.min_visible <= 1:
            raise ConfigError(f"min_visible is {self.min_visible}; expected a share, 0 to 1")
        if not 0 <= self.min_side < np.inf:
            raise ConfigError(f"min_side is {self.min_side}; expected pixels, 0 or more")
        if self.on_bad not in get_args(OnBadBox):
            raise ConfigError(f"on_bad is {self.on_bad!r}; expected one of {', '.join(get_args(OnBadBox))}")
        if self.num_keypoints is not None and self.num_keypoints < 1:
            raise ConfigError(f"num_keypoints is {self.num_keypoints}; expected at least 1")
        flat = [number for pair in self.flip_pairs or () for number in pair]
        if min(flat, default=0) < 0 or len(set(flat)) < len(flat):
            raise ConfigError(f"flip_pairs is {self.flip_pairs}; expected pairs of different numbers from 0")


def parse_objects(settings: Mapping[str, Any]) -> ObjectConfig:
    """Return the settings that `dataclasses.asdict` has turned into JSON values, whose tuples are lists."""
    pairs, columns = settings.get("flip_pairs"), settings.get("columns")
    tuples: dict[str, Any] = (
        {} if pairs is None else {"flip_pairs": tuple((first, second) for first, second in pairs)}
    )
    tuples |= {} if columns is None else {"columns": tuple(columns)}
    return ObjectConfig(**{**settings, **tuples})


@dataclass(frozen=True)
class View:
    """What the output shows of one image.

    Attributes:
        region: left, top, right and bottom in pixels of the image; see `Windows.scaled`.
        flip: whether the output is mirrored.
        width, height: size of the image in pixels.
        shown: width and height of the output in pixels.
    """

    region: Floats
    flip: bool
    width: int
    height: int
    shown: tuple[int, int]

    def map_points(self, points: Floats) -> Floats:
        """Return points of the image, `float64[..., 2]`, as points of the output; outside of the window too."""
        # Multiply before dividing: a window of the size of the output then maps whole pixels to themselves.
        mapped = (points - self.region[:2]) * self.shown / (self.region[2:] - self.region[:2])
        if self.flip:
            mapped[..., 0] = self.shown[0] - mapped[..., 0]
        return np.asarray(mapped)

    def nearest(self, width: int, height: int) -> tuple[Integers, Integers]:
        """Return rows and columns of the pixels of a mask that are nearest to those of the output.

        The mask, `width` x `height`, shows the whole image. Rows are `int64[shown[1], 1]`, columns `int64[shown[0]]`.
        """
        (left, top, right, bottom), (across, down) = self.region, self.shown
        x = (left + (np.arange(across) + 0.5) * (right - left) / across) * (width / self.width)
        y = (top + (np.arange(down) + 0.5) * (bottom - top) / down) * (height / self.height)
        columns = np.clip(np.floor(x), 0, width - 1).astype(np.int64)
        rows = np.clip(np.floor(y), 0, height - 1).astype(np.int64)
        return rows[:, None], columns[::-1] if self.flip else columns


def read_boxes(value: Any) -> Floats:
    """Return a stored list of boxes as `float64[n, 4]`; [] for None. Raises BadSampleError: it is no such list."""
    return _numbers(value, (-1, 4), "boxes", "four numbers each: left, top, right, bottom")


def read_keypoints(value: Any, num_keypoints: int) -> Floats:
    """Return a stored list of the keypoints of objects: `float64[n, num_keypoints, 3]`, x, y and visibility.

    Raises:
        BadSampleError: it is no such list.
    """
    expected = f"{num_keypoints} times x, y and visibility each"
    return _numbers(value, (-1, num_keypoints, 3), "keypoints", expected)


def _numbers(value: Any, shape: tuple[int, ...], what: str, expected: str) -> Floats:
    if isinstance(value, np.ndarray):
        return value  # it was read before
    rows = [] if value is None else value
    size = int(np.prod(shape[1:]))
    try:
        numbers = np.array([np.asarray(row, np.float64).reshape(size) for row in rows], np.float64)
    except (TypeError, ValueError) as error:
        raise BadSampleError(f"its {what} do not have {expected}") from error
    return numbers.reshape(shape) if len(rows) else np.empty((0, *shape[1:]))


def find_bad_boxes(boxes: Floats, width: int, height: int) -> dict[int, str]:
    """Return the boxes that lie outside of their image, have no area, or are not finite: number -> reason."""
    inside = _clip(boxes, 0, 0, width, height)
    is_good = np.isfinite(boxes).all(axis=1) & (inside[:, 2] > inside[:, 0]) & (inside[:, 3] > inside[:, 1])
    return {
        number: f"box {number}, {boxes[number].tolist()}, {_NO_AREA}" for number in np.flatnonzero(~is_good).tolist()
    }


def map_boxes(boxes: Floats, view: View, config: ObjectConfig) -> tuple[npt.NDArray[np.float32], Integers]:
    """Return the boxes of an image as the output shows them: clipped to its edges, without those that are cut off.

    Args:
        boxes: `float64[n, 4]`, left, top, right and bottom in pixels of the image; bad ones are dropped.
        view: window and flip of the image.
        config: which boxes are kept.

    Returns:
        `float32[k, 4]` in pixels of the output, and the numbers of these boxes among `boxes`, `int64[k]`, ascending.
    """
    is_good = np.ones(len(boxes), np.bool_)
    is_good[list(find_bad_boxes(boxes, view.width, view.height))] = False
    numbers = np.flatnonzero(is_good).astype(np.int64)
    in_image = _clip(boxes[numbers], 0, 0, view.width, view.height)
    visible = _clip(in_image, *view.region)
    # What lies outside of the image was never visible, so it does not count as cut off.
    share = _areas(visible) / _areas(in_image)
    mapped = view.map_points(visible.reshape(-1, 2, 2)).reshape(-1, 4)
    if view.flip:
        mapped = mapped[:, [2, 1, 0, 3]]
    # Rounded before the test, so that no box of float32 has equal sides.
    shown = mapped.astype(np.float32)
    sides = shown[:, 2:] - shown[:, :2]
    is_kept = (share >= config.min_visible) & (sides > 0).all(axis=1) & (sides >= config.min_side).all(axis=1)
    return shown[is_kept], numbers[is_kept]


def map_keypoints(keypoints: Floats, view: View, flip_pairs: tuple[tuple[int, int], ...]) -> npt.NDArray[np.float32]:
    """Return keypoints, `float64[n, k, 3]`, as the output shows them: `float32[n, k, 3]`.

    A keypoint outside of the window, or with visibility 0, becomes (0, 0, 0).
    """
    mapped = np.concatenate([view.map_points(keypoints[..., :2]), keypoints[..., 2:]], axis=-1)
    low, high = view.region[:2], view.region[2:]
    is_inside = ((keypoints[..., :2] >= low) & (keypoints[..., :2] <= high)).all(axis=-1)  # False for NaN
    mapped[~is_inside | ~(keypoints[..., 2] > 0)] = 0
    if view.flip and flip_pairs:
        order = np.arange(mapped.shape[1])
        for first, second in flip_pairs:
            order[[first, second]] = second, first
        mapped = mapped[:, order]
    return mapped.astype(np.float32)


def draw_masks(
    stored: Any, view: View, stored_runs: Any = None
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint8]]:
    """Draw the objects of a sample that have polygons or run lengths.

    Args:
        stored: the list of polygons of each object, or None; of a polygon, x and y in turn, in pixels of the image.
        view: window and flip of the image.
        stored_runs: the list of run lengths of each object, or None; for objects without polygons.

    Returns:
        `bool[n]`, whether an object has a mask; and these masks: of polygons, see `draw_polygons`; of run lengths,
        the nearest pixels.

    Raises:
        BadSampleError: a polygon is no such list, run lengths are not those of the image, or the masks would take
            more than a GiB.
    """
    has_mask = find_masks(stored, stored_runs)
    count = int(has_mask.sum())
    width, height = view.shown
    if count * width * height > _MAX_MASK_BYTES:
        raise BadSampleError(
            f"its {count} masks of {width}x{height} pixels would take more than {_MAX_MASK_BYTES} bytes"
        )
    masks = np.zeros((count, height, width), np.uint8)
    objects = filter(any, zip_longest(stored or [], stored_runs or []))
    for mask, (polygons, runs) in zip(masks, objects, strict=True):
        if polygons:
            draw_polygons(polygons, view, mask.view(np.bool_))
            continue
        try:
            whole = decode_runs(runs, view.width, view.height)
        except (TypeError, ValueError) as error:
            raise BadSampleError(f"the run lengths of an object are not valid: {error}") from error
        mask[...] = whole[view.nearest(view.width, view.height)]
    return has_mask, masks


def find_masks(stored: Any, stored_runs: Any = None) -> npt.NDArray[np.bool_]:
    """Return whether each object of a sample has a mask, `bool[n]`; for the arguments, see `draw_masks`."""
    return np.array(
        [bool(polygons or runs) for polygons, runs in zip_longest(stored or [], stored_runs or [])], np.bool_
    )


def boxes_of_masks(masks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the boxes around the pixels of masks, `uint8[n, height, width]`: `float32[n, 4]`; zeros for none."""
    ends = []
    for axis in (1, 2):  # columns, then rows
        is_seen = masks.max(axis=axis, initial=0) > 0
        first, last = is_seen.argmax(axis=1), is_seen.shape[1] - is_seen[:, ::-1].argmax(axis=1)
        ends.append(np.stack([first, last], axis=1) * is_seen.any(axis=1)[:, None])
    return np.stack(ends, axis=2).reshape(-1, 4).astype(np.float32)


def draw_polygons(polygons: Sequence[Any], view: View, mask: npt.NDArray[np.bool_]) -> None:
    """Set the pixels of `mask`, `bool[height, width]`, whose centres are inside of any of an object's polygons."""
    width, height = view.shown
    centres = np.arange(height) + 0.5
    for polygon in polygons:
        try:
            stored = np.asarray(polygon, np.float64).reshape(-1, 2)
        except (TypeError, ValueError) as error:
            raise BadSampleError("a polygon of it is no list of x and y") from error
        if not (np.abs(stored) < _FAR).all():  # also false for NaN
            raise BadSampleError("a polygon of it is not finite")
        points = view.map_points(stored)
        (x, y), (next_x, next_y) = points.T, np.roll(points, -1, axis=0).T
        rows, edges = np.nonzero((y <= centres[:, None]) != (next_y <= centres[:, None]))
        share = (centres[rows] - y[edges]) / (next_y - y)[edges]
        crossings = x[edges] + share * (next_x - x)[edges]
        # Each crossing turns inside into outside, and back, for the centres to its right.
        first = np.clip(np.ceil(crossings - 0.5), 0, width).astype(np.int64)
        turns = np.zeros((height, width + 1), np.bool_)
        np.logical_xor.at(turns, (rows, first), True)
        mask |= np.logical_xor.accumulate(turns[:, :-1], axis=1)


def _clip(boxes: Floats, left: float, top: float, right: float, bottom: float) -> Floats:
    return np.clip(boxes, [left, top, left, top], [right, bottom, right, bottom])


def _areas(boxes: Floats) -> Floats:
    return np.asarray((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]))
