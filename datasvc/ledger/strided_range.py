"""Strided ranges: sets of positions that consist of equally long runs at equal distances, stored as five integers.

A ledger record holds one strided range. A rank serves the same part of each global batch, or the same lanes of the
access order (see `order`). In both cases, the positions that the rank serves in all steps form one strided range,
whatever the length of the epoch. `cover` finds the positions that no range has, or several: it computes only the
edges of runs and windows, never a list of all positions.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from datasvc.keyed_random import Integers

_CHUNK_RUNS = 1 << 20  # number of runs in memory at a time
_MAX_RANGES = 1000  # number of ranges that `Uneven` keeps; bounds the memory if many positions are uneven


@dataclass(frozen=True)
class StridedRange:
    """Positions p of the window [start, stop) with (p - offset) % period < length.

    Attributes:
        start: first position of the window.
        stop: first position after the window.
        period: distance between the starts of runs, at least 1.
        offset: start of a run, 0 <= offset < period.
        length: length of a run; 0 for a window without positions.
    """

    start: int
    stop: int
    period: int
    offset: int
    length: int

    @property
    def size(self) -> int:
        """Number of positions."""
        return self._count_below(self.stop) - self._count_below(self.start) if self.start < self.stop else 0

    @property
    def is_contiguous(self) -> bool:
        """Whether the range contains every position of its window."""
        return self.length >= self.period

    def clip(self, start: int, stop: int) -> StridedRange:
        """Return the part of the range within [start, stop)."""
        first = max(self.start, start)
        return dataclasses.replace(self, start=first, stop=max(first, min(self.stop, stop)))

    def continues(self, other: StridedRange) -> bool:
        """Return whether this range starts where `other` ends, and has the same runs."""
        own_runs, other_runs = (self.period, self.offset, self.length), (other.period, other.offset, other.length)
        return own_runs == other_runs and other.stop == self.start

    def runs(self) -> tuple[Integers, Integers]:
        """Return starts and stops of the runs, clipped to the window: `int64[n]` each, ascending."""
        if not self.length or self.start >= self.stop:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        if self.is_contiguous:
            return np.array([self.start]), np.array([self.stop])
        # First compute the whole runs of the periods `first` to `last`, which contain the first and the last position
        # of the window. Then clip the runs to the window.
        first = (self.start - self.offset) // self.period
        last = (self.stop - 1 - self.offset) // self.period
        starts = np.arange(first, last + 1) * self.period + self.offset
        stops = np.minimum(starts + self.length, self.stop)
        starts = np.maximum(starts, self.start)
        inside = starts < stops
        return starts[inside], stops[inside]

    def positions(self) -> Iterator[int]:
        """Yield the positions, ascending."""
        position = self.start
        while position < self.stop:
            within = (position - self.offset) % self.period
            if within < self.length:
                yield position
                position += 1
            else:
                position += self.period - within

    def _count_below(self, position: int) -> int:
        """Return the number of positions that the runs, not clipped to the window, have in [offset, position)."""
        # For a position below `offset` the count is negative, so that the difference of two counts is right.
        num_periods, within = divmod(position - self.offset, self.period)
        return num_periods * min(self.length, self.period) + min(within, self.length)


def contiguous(start: int, stop: int) -> StridedRange:
    """Return the range of all positions of [start, stop)."""
    return StridedRange(start, stop, 1, 0, 1)


def first_positions(ranges: Iterable[StridedRange], count: int) -> list[int]:
    """Return the first `count` positions of several ranges, ascending."""
    return list(islice(heapq.merge(*(strided.positions() for strided in ranges)), count))


def split_runs(positions: Integers | Sequence[int]) -> list[StridedRange]:
    """Return a contiguous range for each run of consecutive positions, in the given order."""
    values: Integers = np.asarray(positions, np.int64)
    if not len(values):
        return []
    cuts = np.flatnonzero(np.diff(values) != 1) + 1
    return [contiguous(int(run[0]), int(run[-1]) + 1) for run in np.split(values, cuts)]


def describe_positions(start: int, stop: int, positions: Integers) -> list[StridedRange]:
    """Return ranges with exactly the given positions, `int64[n]` of one rank in the global batch [start, stop).

    It is one range over the whole window if the positions are strided, as the results of `order.slice_step` are.
    Otherwise one range per run, and then a range without positions, with a window that ends at `stop`.
    """
    # Candidates are derived from the first runs only, so compare each with all positions.
    for candidate in _candidates(start, stop, positions):
        if _holds_exactly(candidate, positions):
            return [candidate]
    return [*split_runs(positions), StridedRange(start, stop, 1, 0, 0)]


def _candidates(start: int, stop: int, positions: Integers) -> Iterator[StridedRange]:
    """Yield strided ranges that the positions may form, judged by their first runs."""
    num_positions = len(positions)
    if not num_positions:
        yield StridedRange(start, stop, 1, 0, 0)
        return
    if num_positions == stop - start:
        yield contiguous(start, stop)
    first = int(positions[0])
    if int(positions[-1]) - first == num_positions - 1:  # one run
        yield _strided(start, stop, stop - start, first, num_positions)
        return
    # Indices in `positions` where the first runs start, at most four, and then the end of `positions`.
    cuts = [0, *(np.flatnonzero(np.diff(positions) != 1)[:3] + 1).tolist(), num_positions]
    starts = [int(positions[cut]) for cut in cuts[:-1]]
    # The window may clip the first and the last run. A run between these two is whole, and gives period and length.
    if len(starts) > 2:
        yield _strided(start, stop, starts[2] - starts[1], starts[1], cuts[2] - cuts[1])
    # One run that crosses the end of the window and continues at the start of the window: the window is the period.
    yield _strided(start, stop, stop - start, starts[1], num_positions)
    # Two runs, of which the first is whole.
    yield _strided(start, stop, starts[1] - starts[0], starts[0], cuts[1])


def _strided(start: int, stop: int, period: int, offset: int, length: int) -> StridedRange:
    """Return a strided range whose `offset` may be the start of any run."""
    return StridedRange(start, stop, max(period, 1), offset % max(period, 1), length)


def _holds_exactly(strided: StridedRange, positions: npt.NDArray[Any]) -> bool:
    # With as many positions as the range has, it is enough that they are distinct and all in the range.
    if strided.size != len(positions):
        return False
    if not len(positions):
        return True
    ascending = bool((positions[1:] > positions[:-1]).all())
    inside = strided.start <= int(positions[0]) and int(positions[-1]) < strided.stop
    return ascending and inside and bool(((positions - strided.offset) % strided.period < strided.length).all())


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
    """Return the positions of [start, stop) that are not in exactly one of the ranges, by ascending windows."""
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
    """Add the positions of [start, stop) that are not covered once; `laps` repeats them, see `cover`."""
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
    """Return the edges of intervals of [start, stop), `int64[n + 1]`, and the number of ranges over each of them."""
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
