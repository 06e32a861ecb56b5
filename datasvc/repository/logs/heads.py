"""Finds the heads of the lines of a data set: the versions that its name and `NAME@BRANCH` refer to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.repository.logs.branches import BRANCHES, MAIN, Branch, BranchLogs, LinePosition, find_head
from datasvc.repository.logs.log import Entry, Log
from datasvc.repository.logs.references import parse_reference

_MAX_AHEAD: Final = 64


MERGED: Final = "merged"


class PositionReader:
    """Reads the positions of entries, the more at once the longer a search goes on, unless the log is local."""

    def __init__(self, versions: Log, *, is_local: bool) -> None:
        self._versions = versions
        self._max_ahead = 1 if is_local else _MAX_AHEAD
        self._ahead = 1
        self._entries: dict[int, Entry] = {}
        self._errors: dict[int, CorruptDataError | ConfigError] = {}

    def __call__(self, number: int) -> LinePosition:
        """Return the position of an entry.

        Raises:
            CorruptDataError: the entry cannot be read, so it is not known which line it is on.
            ConfigError, NotFoundError, UnavailableError: see `Log.read`.
        """
        try:
            return LinePosition.of(self.entry(number))
        except CorruptDataError as damage:
            version = f"{self._versions.path.split('/')[-2]}@{number}"
            raise CorruptDataError(
                f"it is not known which branch {version} is on, because its entry cannot be read: {damage}; if there "
                f"is no copy, `datasvc mark-lost {version}` gives it up"
            ) from damage

    def entry(self, number: int) -> Entry:
        """Return an entry; for errors, see `Log.read`."""
        if number not in self._entries and number not in self._errors:
            self._read(number)
        if number in self._errors:
            raise self._errors[number]
        return self._entries[number]

    def _read(self, number: int) -> None:
        ahead, self._ahead = self._ahead, min(2 * self._ahead, self._max_ahead)
        numbers = [each for each in range(max(1, number - ahead + 1), number + 1) if each not in self._entries]
        try:
            entries, errors = self._versions.try_entries(numbers)
        except NotFoundError:
            # One of the entries before it is gone, and may not be needed.
            entries, errors = self._versions.try_entries([number])
        self._entries |= {entry.number: entry for entry in entries}
        self._errors |= errors


@dataclass(frozen=True)
class Heads:
    """The heads of all lines of a data set, found when they are asked for.

    Attributes:
        numbers: numbers of the versions, ascending.
        removed: numbers of the removed versions.
        moves: numbers of the moves of each branch, ascending.
    """

    open_branches: Callable[[], BranchLogs]
    open_positions: Callable[[], PositionReader]
    numbers: Sequence[int]
    removed: Collection[int]
    moves: Mapping[str, Sequence[int]]

    @classmethod
    def of_logs(
        cls,
        open_branches: Callable[[], BranchLogs],
        open_positions: Callable[[], PositionReader],
        logs: Mapping[str, Sequence[int]],
        removed: Collection[int],
    ) -> Heads:
        """Return the heads of a data set from a listing of its logs, which has the numbers of entries by path."""
        prefix = f"{BRANCHES}/"
        moves = {path.removeprefix(prefix): numbers for path, numbers in logs.items() if path.startswith(prefix)}
        return cls(open_branches, open_positions, logs["versions"], removed, moves)

    @cached_property
    def branches(self) -> BranchLogs:
        """The logs of the branches, opened when they are needed, as a model and most data sets have none."""
        return self.open_branches()

    @cached_property
    def read(self) -> PositionReader:
        """The reader of the lines of versions, opened when it is needed."""
        return self.open_positions()

    @cached_property
    def main(self) -> int | None:
        """Newest version of the main line that is not removed; None if there is none. For errors, see `find_head`."""
        if self.moves:
            return find_head(self.read, MAIN, self._newest, self.removed)
        # There never was a branch, so no entry is read: all are on the main line.
        return next((number for number in reversed(self.numbers) if number not in self.removed), None)

    def find(self, branch: str) -> int | None:
        """Return the head of a branch; None if there is no such branch. For errors, see `find_head`."""
        numbers = self.moves.get(branch)
        found = self.branches.find(branch, numbers) if numbers else None
        return None if found is None else self.head_of(found)

    def head_of(self, branch: Branch) -> int:
        """Return the head of a branch that exists; for errors, see `find_head`."""
        own = find_head(self.read, branch.line, self._newest, self.removed, after=branch.after)
        return branch.start if own is None else own

    @property
    def _newest(self) -> int:
        return self.numbers[-1] if self.numbers else 0


def parents_of(read: PositionReader, number: int) -> list[int]:
    """Return the versions of the data set that a version continues; of a merge, that of its own line is the first.

    An ingest without `append` on the main line takes the place of the version before it, which then is its parent.
    """
    content = read.entry(number).content
    parents = [parent for parent in map(_number_of, recorded_parents(content)) if parent is not None]
    # In a copy from another repository, the version before it need not be one that it continues there.
    if not parents and content.get("origin") is None:
        position = read(number)
        before = find_head(read, MAIN, position.before(MAIN)) if position.line == MAIN else None
        parents = [] if before is None else [before]
    return [parent for parent in parents if 0 < parent < number]


def recorded_parents(content: Mapping[str, Any]) -> list[str]:
    """Return the references in `parent` and `merged` of the entry of a data-set version."""
    merged = content.get(MERGED)
    return [str(ref) for ref in (content.get("parent"), *(merged if isinstance(merged, list) else ())) if ref]


def _number_of(ref: str) -> int | None:
    # The name may be an earlier one of the data set, see `rename`; the number is the same.
    try:
        return parse_reference(ref).version
    except ConfigError:
        return None
