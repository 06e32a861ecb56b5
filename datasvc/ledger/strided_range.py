"""Sets of positions as one rank of many serves them: equal teeth at equal distances. Arithmetic, not enumeration.

A rank takes the same part of each global batch, or the same lanes of the order; either way what it serves in step
after step is one comb, however long the epoch.
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
    """The positions p of [start, stop) with (p - offset) % period < length.

    Attributes:
        start: of the window.
        stop: its half-open end.
        period: distance of the teeth, at least 1.
        offset: where a tooth begins, 0 <= offset < period.
        length: of a tooth; 0 for a window that holds no position.
    """

    start: int
    stop: int
    period: int
    offset: int
    length: int

    @property
    def size(self) -> int:
        """How many positions these are."""
        return self._below(self.stop) - self._below(self.start) if self.start < self.stop else 0

    @property
    def is_solid(self) -> bool:
        """Whether every position of the window is in it."""
        return self.length >= self.period

    def clip(self, start: int, stop: int) -> StridedRange:
        """Return the part in [start, stop)."""
        first = max(self.start, start)
        return dataclasses.replace(self, start=first, stop=max(first, min(self.stop, stop)))

    def continues(self, other: StridedRange) -> bool:
        """Return whether this one goes on right where `other` ends, with the same teeth."""
        teeth, others = (self.period, self.offset, self.length), (other.period, other.offset, other.length)
        return teeth == others and other.stop == self.start

    def spans(self) -> tuple[Integers, Integers]:
        """Return starts and stops of the teeth, cut at the window's ends: `int64[n]` each, ascending."""
        if not self.length or self.start >= self.stop:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        if self.is_solid:
            return np.array([self.start]), np.array([self.stop])
        first, last = ((place - self.offset) // self.period for place in (self.start, self.stop - 1))
        starts = np.arange(first, last + 1) * self.period + self.offset
        stops = np.minimum(starts + self.length, self.stop)
        starts = np.maximum(starts, self.start)
        inside = starts < stops
        return starts[inside], stops[inside]

    def positions(self) -> Iterator[int]:
        """Yield the positions, ascending."""
        place = self.start
        while place < self.stop:
            within = (place - self.offset) % self.period
            if within < self.length:
                yield place
                place += 1
            else:
                place += self.period - within

    def _below(self, place: int) -> int:
        laps, within = divmod(place - self.offset, self.period)
        return laps * min(self.length, self.period) + min(within, self.length)


def solid(start: int, stop: int) -> StridedRange:
    """Return all positions of [start, stop)."""
    return StridedRange(start, stop, 1, 0, 1)


def first_positions(combs: Iterable[StridedRange], count: int) -> list[int]:
    """Return the first `count` positions of combs, ascending."""
    return list(islice(heapq.merge(*(comb.positions() for comb in combs)), count))


def split_runs(positions: Integers | Sequence[int]) -> list[StridedRange]:
    """Return a solid comb for each run of consecutive positions, in the order given."""
    values: Integers = np.asarray(positions, np.int64)
    if not len(values):
        return []
    cuts = np.flatnonzero(np.diff(values) != 1) + 1
    return [solid(int(run[0]), int(run[-1]) + 1) for run in np.split(values, cuts)]


def describe_positions(start: int, stop: int, positions: Integers) -> list[StridedRange]:
    """Return combs that hold exactly `positions`; together their windows end at `stop`.

    Args:
        start: of a global batch.
        stop: its half-open end.
        positions: `int64[n]` in [start, stop): a rank's part of it.

    Returns:
        One comb over the whole window where the positions make one, as the parts of all ranks do; else one a run.
    """
    for candidate in _candidates(start, stop, positions):
        if _holds_exactly(candidate, positions):
            return [candidate]
    return [*split_runs(positions), StridedRange(start, stop, 1, 0, 0)]


def _candidates(start: int, stop: int, positions: Integers) -> Iterator[StridedRange]:
    num_positions = len(positions)
    if not num_positions:
        yield StridedRange(start, stop, 1, 0, 0)
        return
    if num_positions == stop - start:
        yield solid(start, stop)
    first = int(positions[0])
    if int(positions[-1]) - first == num_positions - 1:
        yield _comb(start, stop, stop - start, first, num_positions)
        return
    cuts = [0, *(np.flatnonzero(np.diff(positions) != 1)[:3] + 1).tolist(), num_positions]
    starts = [int(positions[cut]) for cut in cuts[:-1]]
    # The window may cut the first tooth and the last: then those between say more, or both are halves of one.
    if len(starts) > 2:
        yield _comb(start, stop, starts[2] - starts[1], starts[1], cuts[2] - cuts[1])
    yield _comb(start, stop, stop - start, starts[1], num_positions)
    yield _comb(start, stop, starts[1] - starts[0], starts[0], cuts[1])


def _comb(start: int, stop: int, period: int, offset: int, length: int) -> StridedRange:
    return StridedRange(start, stop, max(period, 1), offset % max(period, 1), length)


def _holds_exactly(comb: StridedRange, positions: npt.NDArray[Any]) -> bool:
    if comb.size != len(positions):
        return False
    if not len(positions):
        return True
    ascending = bool((positions[1:] > positions[:-1]).all())
    inside = comb.start <= int(positions[0]) and int(positions[-1]) < comb.stop
    return ascending and inside and bool(((positions - comb.offset) % comb.period < comb.length).all())
