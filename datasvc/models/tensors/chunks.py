"""How tensors are cut into pieces, and whether pieces make up a tensor. Pure: boxes in, boxes out.

A box is the start and the shape of a block of a tensor, both one number per dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]

PIECE_BYTES: Final = 8 << 20
# Honest tilings compare a piece with few others. More is a table made to keep its reader busy.
_MAX_COMPARISONS: Final = 50_000_000


def plan_pieces(shape: Shape, item_bytes: int, *, piece_bytes: int = PIECE_BYTES) -> list[Box]:
    """Return boxes of at most `piece_bytes` that tile a tensor, cut along leading dimensions, in row-major order.

    Each is contiguous in a row-major tensor. [] for a tensor without elements.
    """
    if not math.prod(shape):
        return []
    if not shape or math.prod(shape) * item_bytes <= piece_bytes:
        return [((0,) * len(shape), shape)]
    row_bytes = math.prod(shape[1:]) * item_bytes
    if row_bytes > piece_bytes:
        inner = plan_pieces(shape[1:], item_bytes, piece_bytes=piece_bytes)
        return [((row, *start), (1, *size)) for row in range(shape[0]) for start, size in inner]
    rows = max(1, piece_bytes // row_bytes)
    rest = (0,) * (len(shape) - 1)
    return [((row, *rest), (min(rows, shape[0] - row), *shape[1:])) for row in range(0, shape[0], rows)]


def is_tiling(shape: Shape, boxes: Sequence[Box]) -> bool:
    """Return whether every element of a tensor of `shape` lies in exactly one of `boxes`. None may be empty."""
    for start, size in boxes:
        if len(start) != len(shape) or len(size) != len(shape):
            return False
        if any(s < 0 or n < 1 or s + n > most for s, n, most in zip(start, size, shape, strict=True)):
            return False
    if sum(math.prod(size) for _, size in boxes) != math.prod(shape):
        return False
    return len(boxes) <= 1 or not _overlap(boxes)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the block that two boxes of one tensor share, None where they share nothing."""
    start = tuple(map(max, a[0], b[0]))
    stop = tuple(min(s + n, t + m) for s, n, t, m in zip(*a, *b, strict=True))
    size = tuple(end - begin for begin, end in zip(start, stop, strict=True))
    return (start, size) if all(n > 0 for n in size) else None


def slices(box: Box, *, origin: Shape | None = None) -> tuple[slice, ...]:
    """Return the box as an index, relative to `origin`, by default the tensor's own."""
    begin = origin or (0,) * len(box[0])
    return tuple(slice(s - o, s - o + n) for s, n, o in zip(*box, begin, strict=True))


def flat_offset(shape: Shape, box: Box) -> int | None:
    """Return at which element of a row-major tensor a box begins, None where it is not contiguous in it."""
    start, size = box
    cut = next((place for place, count in enumerate(size) if count != 1), len(size))
    if size[cut + 1 :] != shape[cut + 1 :]:
        return None
    return sum(place * math.prod(shape[number + 1 :]) for number, place in enumerate(start))


def _overlap(boxes: Sequence[Box]) -> bool:
    """Return whether two boxes share an element, by a sweep along the dimension that tells most of them apart."""
    starts = np.array([start for start, _ in boxes], np.int64)
    stops = starts + np.array([size for _, size in boxes], np.int64)
    along = max(range(starts.shape[1]), key=lambda dimension: len(np.unique(starts[:, dimension])))
    order = np.argsort(starts[:, along], kind="stable")
    starts, stops = starts[order], stops[order]
    # Whoever begins before a box ends, and stands behind it, may overlap it.
    ends = np.searchsorted(starts[:, along], stops[:, along], side="left")
    firsts = np.arange(1, len(boxes) + 1)
    if int(np.maximum(ends - firsts, 0).sum()) > _MAX_COMPARISONS:
        return True
    for box, (first, end) in enumerate(zip(firsts.tolist(), ends.tolist(), strict=True)):
        if first < end:
            apart = (starts[first:end] >= stops[box]) | (stops[first:end] <= starts[box])
            if not apart.any(axis=1).all():
                return True
    return False
