"""How often each position of a range is in a number of combs, in memory that does not grow with the range."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from datasvc.keyed_random import Integers
from datasvc.ledger.strided_range import StridedRange, solid

_CHUNK_TEETH = 1 << 20
_KEPT = 1000


@dataclass
class Uneven:
    """Positions of one kind.

    Attributes:
        count: all of them.
        combs: where they are; no more than the first thousand combs.
    """

    count: int = 0
    combs: list[StridedRange] = field(default_factory=list)

    def add(self, comb: StridedRange) -> None:
        """Count one more comb, disjoint from the others."""
        self.count += comb.size
        if len(self.combs) < _KEPT:
            self.combs.append(comb)


@dataclass
class Coverage:
    """What is not covered exactly once.

    Attributes:
        never: positions in no comb.
        repeated: positions in more than one.
    """

    never: Uneven = field(default_factory=Uneven)
    repeated: Uneven = field(default_factory=Uneven)


def cover(combs: Sequence[StridedRange], start: int, stop: int) -> Coverage:
    """Return which positions of [start, stop) are not in exactly one of the combs.

    Between two ends of windows the cover repeats with the periods' least common multiple, so one such lap is laid
    out and stands for all. Laps that are longer than the range are laid out in chunks.

    Args:
        combs: in any order.
        start: of the range.
        stop: its half-open end.

    Returns:
        Combs ascending by window.
    """
    found = Coverage()
    for first, last, active in _pieces(combs, start, stop):
        lap = math.lcm(*(comb.period for comb in active if not comb.is_solid))
        repeats = lap < last - first
        for begin, end in _chunks(active, first, first + lap if repeats else last):
            _count(found, active, begin, end, (first, last, lap) if repeats else None)
    return found


def _pieces(combs: Sequence[StridedRange], start: int, stop: int) -> Iterator[tuple[int, int, list[StridedRange]]]:
    """Yield [first, last) and the combs whose windows cover it, cut wherever a window begins or ends."""
    waiting = sorted((comb.clip(start, stop) for comb in combs), key=lambda comb: comb.start, reverse=True)
    waiting = [comb for comb in waiting if comb.start < comb.stop and comb.length]
    cuts = sorted({start, stop, *(place for comb in waiting for place in (comb.start, comb.stop))})
    active: list[StridedRange] = []
    for first, last in pairwise(cuts):
        active = [comb for comb in active if comb.stop > first]
        while waiting and waiting[-1].start <= first:
            active.append(waiting.pop())
        yield first, last, active


def _chunks(active: Sequence[StridedRange], start: int, stop: int) -> Iterator[tuple[int, int]]:
    density = sum(1 / comb.period for comb in active if not comb.is_solid)
    length = max(1, int(_CHUNK_TEETH / density)) if density else stop - start
    while start < stop:
        yield start, min(start + length, stop)
        start += length


def _count(
    found: Coverage, active: Sequence[StridedRange], start: int, stop: int, repeats: tuple[int, int, int] | None
) -> None:
    """Add what is uneven in [start, stop), which stands for all laps of `repeats`: first, last and length."""
    edges, counts = _lay_out(active, start, stop)
    for uneven, chosen in ((found.never, counts == 0), (found.repeated, counts > 1)):
        for index in np.flatnonzero(chosen).tolist():
            begin, end = int(edges[index]), int(edges[index + 1])
            if repeats is None:
                uneven.add(solid(begin, end))
            else:
                first, last, lap = repeats
                uneven.add(StridedRange(first, last, lap, begin % lap, end - begin))


def _lay_out(active: Sequence[StridedRange], start: int, stop: int) -> tuple[Integers, Integers]:
    """Return `int64[n + 1]` edges of spans of [start, stop), and in how many combs each of these is, `int64[n]`."""
    spans = [comb.clip(start, stop).spans() for comb in active]
    starts = np.concatenate([np.empty(0, np.int64), *(begins for begins, _ in spans)])
    stops = np.concatenate([np.empty(0, np.int64), *(ends for _, ends in spans)])
    edges = np.unique(np.concatenate([starts, stops, np.array([start, stop])]))
    changes = np.zeros(len(edges), np.int64)
    np.add.at(changes, np.searchsorted(edges, starts), 1)
    np.add.at(changes, np.searchsorted(edges, stops), -1)
    return edges, np.cumsum(changes)[:-1]
