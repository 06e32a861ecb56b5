"""Splits tensors into chunks, and checks that chunks tile a tensor: that each element is in exactly one chunk.

All functions are pure and compute with boxes. A box is the start and the shape of a block of a tensor, each with one
number per dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import add
from typing import Final

import numpy as np

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]

CHUNK_BYTES: Final = 8 << 20
# Chunks of a part of a tensor have 1/16 of the tensor's bytes, but at least 512 KiB and at most `CHUNK_BYTES`.
_MIN_CHUNK_BYTES: Final = 512 << 10
_CHUNKS_PER_TENSOR: Final = 16
# A regular tiling needs few comparisons per box. Boxes of a tensor that need more comparisons than this are rejected
# as invalid, because they may be an attack.
_MAX_COMPARISONS: Final = 50_000_000


def plan_chunks(shape: Shape, item_bytes: int, *, chunk_bytes: int = CHUNK_BYTES) -> list[Box]:
    """Return the boxes of the chunks of a tensor, in row-major order. Each has at most `chunk_bytes`.

    The tensor is split along its first dimensions, so each box is contiguous in memory. An empty tensor has no boxes.
    """
    if not math.prod(shape):
        return []
    if not shape or math.prod(shape) * item_bytes <= chunk_bytes:
        return [((0,) * len(shape), shape)]
    row_bytes = math.prod(shape[1:]) * item_bytes
    if row_bytes > chunk_bytes:
        # Split each row along the next dimensions.
        inner = plan_chunks(shape[1:], item_bytes, chunk_bytes=chunk_bytes)
        return [((row, *start), (1, *size)) for row in range(shape[0]) for start, size in inner]
    num_rows = max(1, chunk_bytes // row_bytes)
    zeros = (0,) * (len(shape) - 1)
    return [((row, *zeros), (min(num_rows, shape[0] - row), *shape[1:])) for row in range(0, shape[0], num_rows)]


def plan_part_chunks(box: Box, shape: Shape, item_bytes: int) -> list[Box]:
    """Return the boxes of the chunks in which `box` of a tensor of `shape` is stored; [] for an empty box."""
    start, size = box
    if size == shape:
        # Plan the same chunks as an ordinary save does, so that equal tensors are stored only once.
        return plan_chunks(shape, item_bytes)
    # Plan smaller chunks: a restore on another number of ranks needs parts of the box, but reads whole chunks.
    tensor_bytes = math.prod(shape) * item_bytes
    chunk_bytes = min(CHUNK_BYTES, max(_MIN_CHUNK_BYTES, tensor_bytes // _CHUNKS_PER_TENSOR))
    # `plan_chunks` counts from the first element of the box; add the index of this element in the tensor.
    return [
        (tuple(map(add, start, inner)), inner_size)
        for inner, inner_size in plan_chunks(size, item_bytes, chunk_bytes=chunk_bytes)
    ]


def is_tiling(shape: Shape, boxes: Sequence[Box]) -> bool:
    """Return whether every element of a tensor of `shape` is in exactly one of `boxes`, and no box is empty."""
    if len(boxes) == 1:  # most tensors: answer fast
        return boxes[0] == ((0,) * len(shape), shape) and 0 not in shape
    if not all(is_inside(box, shape) and 0 not in box[1] for box in boxes):
        return False
    # Boxes tile the tensor if they are inside the tensor, have as many elements as the tensor, and do not overlap.
    if sum(math.prod(size) for _, size in boxes) != math.prod(shape):
        return False
    return not boxes or not _may_overlap(boxes)


def is_inside(box: Box, shape: Shape) -> bool:
    """Return whether a box lies inside a tensor of `shape`. Empty boxes are allowed."""
    start, size = box
    if not len(start) == len(size) == len(shape):
        return False
    dimensions = zip(start, size, shape, strict=True)
    return all(first >= 0 and num >= 0 and first + num <= length for first, num, length in dimensions)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the block that two boxes of one tensor share, None if they share no element."""
    start = tuple(map(max, a[0], b[0]))
    stop = tuple(min(a_start + a_num, b_start + b_num) for a_start, a_num, b_start, b_num in zip(*a, *b, strict=True))
    size = tuple(end - begin for begin, end in zip(start, stop, strict=True))
    return (start, size) if all(num > 0 for num in size) else None


def slices(box: Box, *, origin: Shape | None = None) -> tuple[slice, ...]:
    """Return slices that select a box of a tensor in an array.

    The array holds the part of the tensor that starts at `origin`; by default, the tensor from its first element on.
    """
    offsets = origin or (0,) * len(box[0])
    return tuple(
        slice(start - offset, start - offset + num) for start, num, offset in zip(*box, offsets, strict=True)
    )


def _may_overlap(boxes: Sequence[Box]) -> bool:
    """Return True if two boxes overlap, or if finding out takes more than `_MAX_COMPARISONS` comparisons.

    The boxes are sorted along the dimension with the most distinct starts.
    """
    starts = np.array([start for start, _ in boxes], np.int64)
    stops = starts + np.array([size for _, size in boxes], np.int64)
    swept = max(range(starts.shape[1]), key=lambda dimension: len(np.unique(starts[:, dimension])))
    order = np.argsort(starts[:, swept], kind="stable")
    starts, stops = starts[order], stops[order]  # `int64[boxes, dimensions]`
    # Compare each box only with boxes `first` to `end` - 1: the next ones in this order that start before it stops.
    ends = np.searchsorted(starts[:, swept], stops[:, swept], side="left")
    firsts = np.arange(1, len(boxes) + 1)
    if int(np.maximum(ends - firsts, 0).sum()) > _MAX_COMPARISONS:
        return True
    # Compare a box with all of these at once: with a hundred thousand boxes, a loop over pairs would take minutes.
    for index, (first, end) in enumerate(zip(firsts.tolist(), ends.tolist(), strict=True)):
        if first < end:
            # Two boxes are disjoint if, in at least one dimension, one starts where the other stops, or later.
            apart = (starts[first:end] >= stops[index]) | (stops[first:end] <= starts[index])
            if not apart.any(axis=1).all():
                return True
    return False
