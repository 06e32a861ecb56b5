"""Finds the positions that no strided range contains, and those that several contain. The audit reports them.

A strided range consists of runs of consecutive positions, at equal distances (the period), in a window [start, stop).
Only the edges of runs and windows are computed, never a list of all positions.
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
_MAX_RANGES = 1000  # number of ranges that `Uneven` keeps; bounds the memory if many positions are uneven


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
    """The uneven positions of a check: those that are not covered exactly once.

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
    # Between two window edges, the coverage repeats after the least common multiple of the periods, called a lap.
    # Compute only the first lap, because all laps are alike. It may be long, so compute it in chunks.
    for window_start, window_stop, active in _windows(ranges, start, stop):
        # A contiguous range has the same effect on all positions. If all are contiguous, `lcm()` returns a lap of 1.
        lap = math.lcm(*(strided.period for strided in active if not strided.is_contiguous))
        has_laps = lap < window_stop - window_start
        for begin, end in _chunks(active, window_start, window_start + lap if has_laps else window_stop):
            _add_uneven(result, active, begin, end, (window_start, window_stop, lap) if has_laps else None)
    return result


def _windows(ranges: Sequence[StridedRange], start: int, stop: int) -> Iterator[tuple[int, int, list[StridedRange]]]:
    """Yield start and stop between two adjacent window edges, and the ranges whose windows cover this interval."""
    # Sorted descending, so that the next range to begin is at the end, where `pop` takes constant time.
    waiting = sorted(
        (strided.clip(start, stop) for strided in ranges), key=lambda strided: strided.start, reverse=True
    )
    waiting = [strided for strided in waiting if strided.start < strided.stop and strided.length]
    cuts = sorted({start, stop, *(edge for strided in waiting for edge in (strided.start, strided.stop))})
    active: list[StridedRange] = []
    for interval_start, interval_stop in pairwise(cuts):
        active = [strided for strided in active if strided.stop > interval_start]
        while waiting and waiting[-1].start <= interval_start:
            active.append(waiting.pop())
        yield interval_start, interval_stop, active


def _chunks(active: Sequence[StridedRange], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield consecutive parts of [start, stop) with about `_CHUNK_RUNS` runs each, which bounds the memory."""
    # The density is the number of runs per position.
    density = sum(1 / strided.period for strided in active if not strided.is_contiguous)
    length = max(1, int(_CHUNK_RUNS / density)) if density else stop - start
    while start < stop:
        yield start, min(start + length, stop)
        start += length


def _add_uneven(
    result: Coverage, active: Sequence[StridedRange], start: int, stop: int, laps: tuple[int, int, int] | None
) -> None:
    """Add the positions of [start, stop) that are not covered once.

    If `laps` is given, as (window start, window stop, lap), [start, stop) is in the first lap of this window. Then
    add the same positions of all its laps.
    """
    edges, counts = _count_ranges(active, start, stop)
    for uneven, is_uneven in ((result.never, counts == 0), (result.repeated, counts > 1)):
        for index in np.flatnonzero(is_uneven).tolist():
            run_start, run_stop = int(edges[index]), int(edges[index + 1])
            if laps is None:
                uneven.add(contiguous(run_start, run_stop))
            else:
                window_start, window_stop, lap = laps
                uneven.add(StridedRange(window_start, window_stop, lap, run_start % lap, run_stop - run_start))


def _count_ranges(active: Sequence[StridedRange], start: int, stop: int) -> tuple[Integers, Integers]:
    """Divide [start, stop) into n intervals.

    Returns:
        Edges of the intervals, `int64[n + 1]`, and the number of ranges that cover each interval, `int64[n]`.
    """
    runs = [strided.clip(start, stop).runs() for strided in active]
    # The empty array is for a window without ranges: `concatenate` needs at least one array.
    starts = np.concatenate([np.empty(0, np.int64), *(run_starts for run_starts, _ in runs)])
    stops = np.concatenate([np.empty(0, np.int64), *(run_stops for _, run_stops in runs)])
    edges = np.unique(np.concatenate([starts, stops, np.array([start, stop])]))
    # +1 where a run starts and -1 where one stops: the running sum is the number of runs over each interval.
    changes = np.zeros(len(edges), np.int64)
    np.add.at(changes, np.searchsorted(edges, starts), 1)
    np.add.at(changes, np.searchsorted(edges, stops), -1)
    return edges, np.cumsum(changes)[:-1]
