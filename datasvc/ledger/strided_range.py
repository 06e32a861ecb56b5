"""Strided ranges: sets of positions that consist of equally long runs at equal distances, stored as five integers.

A ledger record holds one strided range. A rank serves the same part of each global batch, or the same lanes of the
access order (see `order`). In both cases, the positions that the rank serves in all steps form one strided range,
whatever the length of the epoch.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from datasvc.keyed_random import Integers


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
    """Return ranges with exactly the given positions; the window of the last range ends at `stop`.

    Args:
        start: first position of a global batch.
        stop: first position after the batch.
        positions: `int64[n]` in [start, stop), the positions of one rank.

    Returns:
        One range over the whole window if the positions are strided, as the results of `order.slice_step` are.
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
