"""The history of a model as a graph in text: forks, fine-tunes of other models, versions with two parents.

* cnn@6      newest first; a star stands above what it was made from
|-.          cnn@6 was made from two: the second has a line of its own
| * cnn@5
* | cnn@4
|-'          a fork: cnn@4 and cnn@5 were both made from cnn@3
* cnn@3
o base@2     made from nothing that is known here: whatever stands below has nothing to do with it
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from datasvc.models.registry.registry import ModelVersion, model_ancestry, version_named
from datasvc.repository import Repository

_Place = tuple[str, int]
# When the newest turn out not to be enough to draw them: how many times as many are read next.
_MORE: Final = 4


@dataclass(frozen=True)
class HistoryLine:
    """A line of the drawing.

    Attributes:
        graph: what is drawn, without spaces at its end.
        version: the version whose place it holds; None for a line that only leads on.
    """

    graph: str
    version: ModelVersion | None = None


def read_history(repository: Repository, name: str, *, last: int | None = None) -> list[HistoryLine]:
    """Return the drawing of a model's history, newest first, with what it was made from in other models.

    The newest versions of a long history cost what they and their ancestors in other models take to read. Only where
    one of those ancestors would be drawn, more is read: before it comes any version that was made of it, and any of
    the model that nothing was made of.

    Args:
        repository: where it is.
        name: of the model.
        last: only so many versions, those that are drawn first, at least 1; None: all.

    Raises: as `Repository.entries`.
    """
    if last is None:
        return draw_history(model_ancestry(repository, name), name)
    num_read, lines = last, None
    while lines is None:
        versions = model_ancestry(repository, name, last=num_read)
        oldest = min(each.version for each in versions if each.name == name)
        older = [number for number in repository.versions("models", name).numbers() if number < oldest]
        lines = draw_newest(versions, name, last=last, older=older)
        num_read *= _MORE
    return lines


def draw_history(versions: Sequence[ModelVersion], name: str) -> list[HistoryLine]:
    """Return the drawing of a history, newest first.

    Args:
        versions: in any order, each once. Parents that are not among them are not drawn.
        name: the model whose versions come before others where either may.
    """
    by_place = {(each.name, each.version): each for each in versions}
    parents = {place: _drawn_parents(each, by_place) for place, each in by_place.items()}
    return _draw(order_history(parents, name), parents, by_place)


def draw_newest(
    versions: Sequence[ModelVersion], name: str, *, last: int, older: Collection[int]
) -> list[HistoryLine] | None:
    """Return the beginning of the drawing of a history of which only the newest versions are known.

    A version is made from versions that are there, so from lower numbers of its own model: all that can stand above
    one of the known is known. Not so where entries were written by hand.

    Args:
        versions: the newest of the model, and all that they were made from in other models.
        name: of the model.
        last: how many versions are drawn.
        older: numbers of its other versions, all lower.

    Returns:
        The first lines of what `draw_history` gives for all versions; None where more must be known to tell.
    """
    by_place = {(each.name, each.version): each for each in versions}
    known = by_place.keys() | {(name, number) for number in older}
    parents = {place: _drawn_parents(by_place[place], known) if place in by_place else () for place in known}
    first = order_history(parents, name)[:last]
    if older:
        by_hand = any(parent[0] == own[0] and parent[1] >= own[1] for own in parents for parent in parents[own])
        if by_hand or any(place[0] != name or place not in by_place for place in first):
            return None
    return _draw(first, parents, by_place)


def order_history(parents: Mapping[_Place, Sequence[_Place]], name: str) -> list[_Place]:
    """Return versions so that each comes before its parents; of those that may come next the newest of `name` first.

    Entries that somebody wrote by hand may name each other as parents: such a circle is cut at its newest version.

    Args:
        parents: of each version, all of them keys as well.
        name: of the model that comes first.
    """
    num_children = dict.fromkeys(parents, 0)
    for named in parents.values():
        for parent in named:
            num_children[parent] += 1

    def rank(place: _Place) -> tuple[bool, str, int]:
        return place[0] != name, place[0], -place[1]

    ready = [(rank(place), place) for place, count in num_children.items() if not count]
    heapq.heapify(ready)
    waiting = sorted(num_children, key=rank, reverse=True)
    ordered: dict[_Place, None] = {}
    while len(ordered) < len(parents):
        if not ready:
            while waiting[-1] in ordered:
                waiting.pop()
            ready.append((rank(waiting[-1]), waiting[-1]))
        _, place = heapq.heappop(ready)
        ordered[place] = None
        for parent in parents[place]:
            num_children[parent] -= 1
            if not num_children[parent] and parent not in ordered:
                heapq.heappush(ready, (rank(parent), parent))
    return list(ordered)


def _draw(
    places: Iterable[_Place], parents: Mapping[_Place, Sequence[_Place]], by_place: Mapping[_Place, ModelVersion]
) -> list[HistoryLine]:
    drawing = _Drawing()
    lines: list[HistoryLine] = []
    for place in places:
        first, *others = drawing.draw(place, parents[place])
        lines.append(HistoryLine(first, by_place[place]))
        lines.extend(map(HistoryLine, others))
    return lines


def _drawn_parents(version: ModelVersion, known: Collection[_Place]) -> tuple[_Place, ...]:
    named = map(version_named, version.parents)
    return tuple(dict.fromkeys(place for place in named if place in known and place is not None))


class _Drawing:
    """The lines that are under way from versions drawn already to their parents: what stands below each column."""

    def __init__(self) -> None:
        self._lanes: list[_Place | None] = []
        self._drawn: set[_Place] = set()

    def draw(self, place: _Place, parents: Sequence[_Place]) -> list[str]:
        """Return the line that holds a version, and those that lead from it to its parents."""
        self._drawn.add(place)
        ahead = [parent for parent in parents if parent not in self._drawn]  # circles are cut
        column = self._column(place)
        self._lanes[column] = place
        lines = [self._row({column: "*" if ahead else "o"})]
        self._lanes[column] = ahead[0] if ahead else None
        lines.extend(self._connect(column, parent) for parent in ahead[1:])
        if ahead and self._lanes.count(ahead[0]) == 2:
            # Of the two that lead there the right one ends, so that what goes on for long stays on the left.
            right = len(self._lanes) - 1 - self._lanes[::-1].index(ahead[0])
            self._lanes[right] = None
            lines.append(self._connect(right, ahead[0]))
        while self._lanes and self._lanes[-1] is None:
            self._lanes.pop()
        return lines

    def _connect(self, start: int, parent: _Place) -> str:
        """Return a line across, from a column to that of a parent, which is opened where there is none."""
        ends = self._lanes[start] is None
        is_open = parent in self._lanes
        stop = self._column(parent)
        self._lanes[stop] = parent
        low, high = sorted((start, stop))
        marks = {column: "+" if self._lanes[column] else "-" for column in range(low + 1, high)}
        marks |= {start: "'" if ends else "|", stop: "|" if is_open else "."}
        toward = "" if ends or not is_open else ">" if stop > start else "<"
        return self._row(marks, low, high, toward)

    def _column(self, place: _Place) -> int:
        """Return the column that leads to a version; else the first free one."""
        if place in self._lanes:
            return self._lanes.index(place)
        if None not in self._lanes:
            self._lanes.append(None)
        return self._lanes.index(None)

    def _row(self, marks: Mapping[int, str], low: int = 0, high: int = 0, toward: str = "") -> str:
        columns = [marks.get(column, "|" if held else " ") for column, held in enumerate(self._lanes)]
        between = ["-" if low <= column < high else " " for column in range(len(columns))]
        if toward:
            between[high - 1 if toward == ">" else low] = toward
        return "".join(f"{mark}{gap}" for mark, gap in zip(columns, between, strict=True)).rstrip()
