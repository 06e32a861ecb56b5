"""Draws the history of a model as a text graph, with forks, ancestors in other models, and versions with two parents.

* cnn@6      newest first; a version stands above its parents
|-.          cnn@6 has two parents: the second one gets a column of its own
| * cnn@5
* | cnn@4
|-'          a fork: cnn@4 and cnn@5 have the same parent cnn@3
* cnn@3
o base@2     no known parent: the line ends here; the next version below is not an ancestor

Lines cross at "+". Where a horizontal line joins two lines that both go on, ">" or "<" points at the parent's line.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from datasvc.models.registry.registry import ModelVersion, model_ancestry, parse_version
from datasvc.repository import Repository

_VersionKey = tuple[str, int]  # model name and version number
# If the versions read so far do not determine the drawing, read this many times as many versions.
_READ_GROWTH: Final = 4


@dataclass(frozen=True)
class HistoryLine:
    """One line of the drawing.

    Attributes:
        graph: characters of the graph, without trailing spaces.
        version: the version on this line; None for a line that only connects columns.
    """

    graph: str
    version: ModelVersion | None = None


def read_history(repository: Repository, name: str, *, last: int | None = None) -> list[HistoryLine]:
    """Draw the history of a model, newest first, including its ancestors in other models.

    With `last` (at least 1), only the first `last` versions are drawn. Only the newest versions of the model and
    their ancestors in other models are read, and more of them until `draw_newest` can draw. For errors, see
    `Repository.entries`.
    """
    if last is None:
        return draw_history(model_ancestry(repository, name), name)
    num_read, lines = last, None
    while lines is None:
        versions = model_ancestry(repository, name, last=num_read)
        oldest = min(version.version for version in versions if version.name == name)
        older = [number for number in repository.versions("models", name).numbers() if number < oldest]
        lines = draw_newest(versions, name, last=last, older=older)
        num_read *= _READ_GROWTH
    return lines


def draw_history(versions: Sequence[ModelVersion], name: str) -> list[HistoryLine]:
    """Draw distinct versions, newest first; if several may come next, those of model `name` come first.

    Parents that are not in `versions` are not drawn.
    """
    by_key = {(version.name, version.version): version for version in versions}
    parents = {key: _existing_parents(version, by_key) for key, version in by_key.items()}
    return _draw(order_history(parents, name), parents, by_key)


def draw_newest(
    versions: Sequence[ModelVersion], name: str, *, last: int, older: Collection[int]
) -> list[HistoryLine] | None:
    """Draw the top of a history of which only the newest versions were read.

    A new version can only have existing parents, so a parent of the same model has a lower number. Thus all
    versions that belong above a version of the model are newer, and were read if it was read. This is not so for an
    ancestor in another model, and not for entries that were written by hand.

    Args:
        versions: newest versions of model `name`, and all their ancestors in other models.
        name: the model.
        last: number of versions to draw.
        older: numbers of the versions of the model that were not read; all of them are lower.

    Returns:
        The first lines of the drawing of all versions; None if more versions must be read to determine them.
    """
    by_key = {(version.name, version.version): version for version in versions}
    existing = by_key.keys() | {(name, number) for number in older}
    parents = {key: _existing_parents(by_key[key], existing) if key in by_key else () for key in existing}
    top = order_history(parents, name)[:last]
    if older:
        # Such a parent comes only from an entry that was written by hand.
        has_newer_parent = any(
            parent[0] == child[0] and parent[1] >= child[1] for child in parents for parent in parents[child]
        )
        if has_newer_parent or any(key[0] != name or key not in by_key for key in top):
            return None
    return _draw(top, parents, by_key)


def order_history(parents: Mapping[_VersionKey, Sequence[_VersionKey]], name: str) -> list[_VersionKey]:
    """Sort versions topologically, children before parents.

    Of several possible next versions, those of model `name` come first, then the other models by name, newest first.

    `parents` has the parents of each version; every parent is a key as well. Entries that were written by hand may
    form a cycle of parents. A cycle is cut at its newest version.
    """
    num_children = dict.fromkeys(parents, 0)
    for parents_of_one in parents.values():
        for parent in parents_of_one:
            num_children[parent] += 1

    def drawing_order(key: _VersionKey) -> tuple[bool, str, int]:
        return key[0] != name, key[0], -key[1]

    ready = [(drawing_order(key), key) for key, count in num_children.items() if not count]
    heapq.heapify(ready)
    # Versions at which a cycle may be cut, in reverse drawing order, so that `pop` removes the first.
    cut_candidates = sorted(num_children, key=drawing_order, reverse=True)
    ordered: dict[_VersionKey, None] = {}
    while len(ordered) < len(parents):
        if not ready:  # only versions of a cycle and their ancestors remain
            while cut_candidates[-1] in ordered:
                cut_candidates.pop()
            ready.append((drawing_order(cut_candidates[-1]), cut_candidates[-1]))
        _, key = heapq.heappop(ready)
        ordered[key] = None
        for parent in parents[key]:
            num_children[parent] -= 1
            if not num_children[parent] and parent not in ordered:
                heapq.heappush(ready, (drawing_order(parent), parent))
    return list(ordered)


def _draw(
    keys: Iterable[_VersionKey],
    parents: Mapping[_VersionKey, Sequence[_VersionKey]],
    by_key: Mapping[_VersionKey, ModelVersion],
) -> list[HistoryLine]:
    drawing = _Drawing()
    lines: list[HistoryLine] = []
    for key in keys:
        first, *others = drawing.draw(key, parents[key])
        lines.append(HistoryLine(first, by_key[key]))
        lines.extend(map(HistoryLine, others))
    return lines


def _existing_parents(version: ModelVersion, existing: Collection[_VersionKey]) -> tuple[_VersionKey, ...]:
    candidates = map(parse_version, version.parents)
    return tuple(dict.fromkeys(key for key in candidates if key in existing and key is not None))


class _Drawing:
    """Columns of the graph. `_targets`: for each column, the parent that its line leads to; None if it is free."""

    def __init__(self) -> None:
        self._targets: list[_VersionKey | None] = []
        self._drawn: set[_VersionKey] = set()

    def draw(self, key: _VersionKey, parents: Sequence[_VersionKey]) -> list[str]:
        """Return the line of a version, followed by the lines that connect it to its parents."""
        self._drawn.add(key)
        undrawn = [parent for parent in parents if parent not in self._drawn]  # a drawn parent closes a cycle
        column = self._column(key)
        self._targets[column] = key
        lines = [self._row({column: "*" if undrawn else "o"})]
        self._targets[column] = undrawn[0] if undrawn else None
        lines.extend(self._connect(column, parent) for parent in undrawn[1:])
        if undrawn and self._targets.count(undrawn[0]) == 2:
            # Two columns lead to the same parent. End the right one, so that long lines stay on the left.
            right = len(self._targets) - 1 - self._targets[::-1].index(undrawn[0])
            self._targets[right] = None
            lines.append(self._connect(right, undrawn[0]))
        while self._targets and self._targets[-1] is None:
            self._targets.pop()
        return lines

    def _connect(self, start: int, parent: _VersionKey) -> str:
        """Return a horizontal line from column `start` to the column of `parent`; open that column if needed."""
        start_ends = self._targets[start] is None
        stop_exists = parent in self._targets
        stop = self._column(parent)
        self._targets[stop] = parent
        low, high = sorted((start, stop))
        # The horizontal line crosses the vertical lines of the columns between.
        marks = {column: "+" if self._targets[column] else "-" for column in range(low + 1, high)}
        marks |= {start: "'" if start_ends else "|", stop: "|" if stop_exists else "."}
        # If both columns continue, only an arrow shows the column that the line leads to.
        toward = "" if start_ends or not stop_exists else ">" if stop > start else "<"
        return self._row(marks, low, high, toward)

    def _column(self, key: _VersionKey) -> int:
        """Return the column that leads to a version, or the first free column if there is none."""
        if key in self._targets:
            return self._targets.index(key)
        if None not in self._targets:
            self._targets.append(None)
        return self._targets.index(None)

    def _row(self, marks: Mapping[int, str], low: int = 0, high: int = 0, toward: str = "") -> str:
        columns = [marks.get(column, "|" if target else " ") for column, target in enumerate(self._targets)]
        between = ["-" if low <= column < high else " " for column in range(len(columns))]
        if toward:
            between[high - 1 if toward == ">" else low] = toward
        return "".join(f"{mark}{gap}" for mark, gap in zip(columns, between, strict=True)).rstrip()
