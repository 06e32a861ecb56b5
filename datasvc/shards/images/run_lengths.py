"""Run lengths (RLE) of COCO's masks: numbers of pixels outside and inside of an object in turn, column after column.

Source: `maskApi.c` of pycocotools, whose compressed form is a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from datasvc.keyed_random import Integers

_MAX_PIXELS: Final = (1 << 31) - 1  # a run length is stored as int32


def parse_runs(segmentation: Mapping[str, Any]) -> tuple[list[int], int, int]:
    """Return the run lengths of a segmentation of COCO, and width and height of its image.

    Raises:
        ValueError, TypeError, KeyError: it has no valid run lengths.
    """
    height, width = map(int, segmentation["size"])
    counts = segmentation["counts"]
    runs = _decode_text(counts) if isinstance(counts, str) else list(map(int, counts))
    check_runs(runs, width, height)
    return runs, width, height


def check_runs(runs: Sequence[int], width: int, height: int) -> None:
    """Raise ValueError unless these are the run lengths of an image of this size."""
    if min(width, height) < 1 or width * height > _MAX_PIXELS:
        raise ValueError(f"a mask has {width}x{height} pixels; expected 1 to {_MAX_PIXELS}")
    if min(runs, default=0) < 0:
        raise ValueError(f"a run length is {min(runs)}; expected 0 or more")
    if sum(runs) != width * height:
        raise ValueError(f"its run lengths have {sum(runs)} pixels, and its image {width}x{height}")


def _decode_text(text: str) -> list[int]:
    """Return the numbers of a compressed text: five bits a character; from the fourth on, less the last but one."""
    numbers: list[int] = []
    value = shift = 0
    for character in text.encode("ascii"):
        code = character - 48
        value |= (code & 31) << shift
        shift += 5
        if code & 32:
            if shift > 60:
                raise ValueError("a run length has too many digits")
            continue
        value -= (1 << shift) if code & 16 else 0
        numbers.append(value + (numbers[-2] if len(numbers) > 2 else 0))
        value = shift = 0
    if shift:
        raise ValueError("the text of the run lengths is cut off")
    return numbers


def decode_runs(runs: Sequence[int], width: int, height: int) -> npt.NDArray[np.bool_]:
    """Return the mask of an image, `bool[height, width]`. Raises ValueError: see `check_runs`."""
    check_runs(runs, width, height)
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(width, height).T


def encode_runs(mask: npt.NDArray[np.bool_]) -> list[int]:
    """Return the run lengths of a mask, `bool[height, width]`."""
    pixels = np.concatenate([[False], mask.T.ravel()])
    edges = np.flatnonzero(pixels[1:] != pixels[:-1])
    runs: list[int] = np.diff(edges, prepend=0, append=mask.size).tolist()
    return runs


def scale_runs(runs: Sequence[int], width: int, height: int, to_width: int, to_height: int) -> list[int]:
    """Return the run lengths of an image that is stored with another size, by the nearest pixels."""
    if (width, height) == (to_width, to_height):
        return list(runs)
    columns, across = _nearest(width, to_width)
    rows, down = _nearest(height, to_height)
    # Search each pixel of the smaller of both sizes once: a file may name either as large as it likes.
    ends = np.array(list(accumulate(runs)), np.int64)
    mask = np.searchsorted(ends, columns * height + rows[:, None], side="right") % 2 == 1
    return encode_runs(mask[down[:, None], across])


def _nearest(side: int, to_side: int) -> tuple[Integers, Integers]:
    """Return the pixels of a side that a scaled one shows, ascending, and which of these each of its pixels shows."""
    nearest = ((np.arange(to_side) + 0.5) * side / to_side).astype(np.int64)
    shown, indices = np.unique(nearest, return_inverse=True)
    return shown, indices
