"""Finds the positions that no strided range, or more than one, contains; the audit reports them.

No list of positions is made. A range consists of runs of consecutive positions inside of a window [start, stop); only
the edges of runs and windows are computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from datasvc.keyed_random import Integers
from datasvc.ledger.strided_range import StridedRange, contiguous

_CHUNK_RUNS = 1 << 20  # number of runs in memory at a time
_MAX_RANGES = 1000


@dataclass
class Uneven:
    """A set of positions: those that no range covers, or those that several ranges cover.

    Attributes:
        count: number of positions in the set.
        ranges: the positions as disjoint ranges; only the first thousand ranges are kept.
    """

    count: int = 0
    ranges: list[StridedRange] = field(default_factory=list)

    def add(self, strided: StridedRange) -> None:
        """Add a range that is disjoint from those added before."""
        self.count += strided.size
        if len(self.ranges) < _MAX_RANGES:
            self.ranges.append(strided)


@dataclass
class Coverage:
    """Positions that are not covered exactly once.

    Attributes:
        never: positions in no range.
        repeated: positions in more than one range.
    """

    never: Uneven = field(default_factory=Uneven)
    repeated: Uneven = field(default_factory=Uneven)


def cover(ranges: Sequence[StridedRange], start: int, stop: int) -> Coverage:
    """Return the positions of [start, stop) that are not in exactly one of the ranges.

    Args:
        ranges: strided ranges, in any order.
        start: first position to check.
        stop: first position after those to check.

    Returns:
        The positions as ranges, in ascending order of their windows.
    """
    result = Coverage()
    # Between two window edges, the coverage repeats with the least common multiple of the periods (a lap). So only
    # the first lap is computed, and its result holds for all laps. A lap may be long, so it is computed in chunks.
    for first, last, active in _windows(ranges, start, stop):
        lap = math.lcm(*(strided.period for strided in active if not strided.is_contiguous))
        repeats = lap < last - first
        for begin, end in _chunks(active, first, first + lap if repeats else last):
            _count(result, active, begin, end, (first, last, lap) if repeats else None)
    return result


def _windows(ranges: Sequence[StridedRange], start: int, stop: int) -> Iterator[tuple[int, int, list[StridedRange]]]:
    """Yield each [first, last) between two adjacent window edges, and the ranges whose windows cover it."""
    # Sorted descending, so that the next range to begin is at the end, where `pop` takes constant time.
    waiting = sorted(
        (strided.clip(start, stop) for strided in ranges), key=lambda strided: strided.start, reverse=True
    )
    waiting = [strided for strided in waiting if strided.start < strided.stop and strided.length]
    cuts = sorted({start, stop, *(edge for strided in waiting for edge in (strided.start, strided.stop))})
    active: list[StridedRange] = []
    for first, last in pairwise(cuts):
        active = [strided for strided in active if strided.stop > first]
        while waiting and waiting[-1].start <= first:
            active.append(waiting.pop())
        yield first, last, active


def _chunks(active: Sequence[StridedRange], start: int, stop: int) -> Iterator[tuple[int, int]]:
    # The density is the number of runs per position. A chunk has about `_CHUNK_RUNS` runs, which bounds the memory.
    density = sum(1 / strided.period for strided in active if not strided.is_contiguous)
    length = max(1, int(_CHUNK_RUNS / density)) if density else stop - start
    while start < stop:
        yield start, min(start + length, stop)
        start += length


def _count(
    result: Coverage, active: Sequence[StridedRange], start: int, stop: int, repeats: tuple[int, int, int] | None
) -> None:
    """Add positions of [start, stop) not covered once; with `repeats` (first, last, lap), those of all laps."""
    edges, counts = _count_cover(active, start, stop)
    for uneven, is_uneven in ((result.never, counts == 0), (result.repeated, counts > 1)):
        for index in np.flatnonzero(is_uneven).tolist():
            begin, end = int(edges[index]), int(edges[index + 1])
            if repeats is None:
                uneven.add(contiguous(begin, end))
            else:
                first, last, lap = repeats
                uneven.add(StridedRange(first, last, lap, begin % lap, end - begin))


def _count_cover(active: Sequence[StridedRange], start: int, stop: int) -> tuple[Integers, Integers]:
    """Return edges of intervals of [start, stop), `int64[n + 1]`, and how many ranges cover each, `int64[n]`."""
    spans = [strided.clip(start, stop).runs() for strided in active]
    starts = np.concatenate([np.empty(0, np.int64), *(begins for begins, _ in spans)])
    stops = np.concatenate([np.empty(0, np.int64), *(ends for _, ends in spans)])
    edges = np.unique(np.concatenate([starts, stops, np.array([start, stop])]))
    # +1 where a run starts and -1 where one stops: the running sum is the number of runs over each interval.
    changes = np.zeros(len(edges), np.int64)
    np.add.at(changes, np.searchsorted(edges, starts), 1)
    np.add.at(changes, np.searchsorted(edges, stops), -1)
    return edges, np.cumsum(changes)[:-1]
