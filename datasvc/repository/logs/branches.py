"""The branches of a data set: a log for each, whose entries begin and end it; and the lines of versions.

A branch begins at a version, and its own versions follow in the log of versions, on its *line*. So a branch that
grows changes nothing here. These logs are below the folder of the versions for a reason: an object store lists names
in order, so a listing that has a version of a branch has the log of the branch too. Without such a log, a reader need
not look at entries to know that all of them are on the main line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.repository.logs.log import BRANCH_FORMAT, Entry, Log, list_logs, read_each
from datasvc.repository.logs.references import LATEST, check_tag, is_name
from datasvc.repository.store.storage import Storage

BRANCHES: Final = "versions/branches"
"""Folder of the logs of branches, in the folder of the data set."""
MAIN_NAME: Final = "main"
RESERVED: Final = frozenset({LATEST, MAIN_NAME})
"""What people call the main line. No branch has one of these names, and no new tag of a data set."""
BRANCH: Final = "branch"
LINES: Final = "lines"
MAIN: Final = ""
"""The main line, which is what a name alone refers to."""
_BRANCH_LINE: Final = re.compile(r"([^/]+)/(0|[1-9][0-9]{0,8})")
# Branches in `lines`, those with the newest versions, so that an entry stays small beside thousands of old branches.
_MAX_LINES: Final = 64


@dataclass(frozen=True)
class Branch:
    """A branch that exists.

    Attributes:
        begun: number of the move that began it.
        start: version at which it begins, which is its head until it has a version of its own.
        after: number of the newest version when it began; its own versions have higher numbers.
    """

    name: str
    begun: int
    start: int
    after: int

    @property
    def line(self) -> str:
        """Line of its own versions."""
        return branch_line(self.name, self.begun)


def check_branch(branch: str) -> str:
    """Return `branch` if it is a valid name of a branch, otherwise raise ConfigError."""
    if branch in RESERVED:
        raise ConfigError(
            f"{branch!r} cannot be the name of a branch: the main line is the name of the data set alone; choose "
            "another name"
        )
    return check_tag(branch, "branch")


class BranchLogs:
    """The branches of one data set; `folder` is that of the data set, such as "datasets/pets"."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage = storage
        self._folder = f"{folder}/{BRANCHES}"
        self.name = folder.rpartition("/")[2]

    def list_moves(self) -> dict[str, list[int]]:
        """Return the numbers of the moves of each branch, ascending; also of branches that have ended."""
        return {
            branch: numbers for branch, numbers in list_logs(self._storage, self._folder).items() if is_name(branch)
        }

    def current(
        self, move_numbers: Mapping[str, Sequence[int]] | None = None
    ) -> tuple[dict[str, Branch], dict[str, CorruptDataError | ConfigError]]:
        """Return the branches by name, sorted, and the errors of those that cannot be read.

        `move_numbers` is a result of `list_moves`, if the caller has it. Raises UnavailableError.
        """
        numbers = self.list_moves() if move_numbers is None else move_numbers
        names = sorted(filter(is_name, numbers))
        branches, errors = read_each(self._storage, lambda branch: self.find(branch, numbers[branch]), names)
        return {name: branch for name, branch in branches.items() if branch is not None}, errors

    def find(self, branch: str, move_numbers: Sequence[int] | None = None) -> Branch | None:
        """Return a branch, or None if it does not exist; for errors, see `Log.read`.

        `move_numbers` are those of its moves, ascending, if the caller has listed them.
        """
        log = self._log(branch)
        numbers = log.numbers() if move_numbers is None else move_numbers
        return _branch(branch, log.read(numbers[-1])) if numbers else None

    def history(self, branch: str) -> list[Entry]:
        """Return every move of a branch, oldest first; [] if it never existed. For errors, see `Log.entries`."""
        return self._log(branch).entries()

    def begin(self, branch: str, version: int, after: int, message: str = "") -> Branch:
        """Begin a branch at a version; `after` is the number of the newest version.

        Raises:
            ConflictError: the branch exists, and nothing was changed; or see `Log.append`.
            CorruptDataError, UnknownOutcomeError, UnavailableError: see `Log.append`.
        """
        log = self._log(branch)

        def build(head: int) -> dict[str, int | str]:
            if head and _branch(branch, log.read(head)) is not None:
                raise ConflictError(
                    f"{self.name} has a branch {branch!r} already; nothing was changed: choose another name, or "
                    f"remove it first: `datasvc branch {self.name} {branch} --remove`"
                )
            return {"version": version, "after": after, "message": message}

        return Branch(branch, log.append(build).number, version, after)

    def end(self, branch: str, *, begun: int | None = None, message: str = "", **more: int) -> None:
        """End a branch; its history stays. With `begun`, only if this move began it. `more` are further fields.

        Raises:
            NotFoundError: the branch does not exist.
            ConflictError: it was begun by another move; or see `Log.append`.
            CorruptDataError, UnknownOutcomeError, UnavailableError: see `Log.append`.
        """
        log = self._log(branch)

        def build(head: int) -> dict[str, int | str | None]:
            try:
                current = _branch(branch, log.read(head)) if head else None
            except CorruptDataError:
                if begun is not None:
                    raise
                return {"version": None, "message": message, **more}  # the way to get rid of a damaged move
            if current is None:
                raise NotFoundError(f"{self.name} has no branch {branch!r}; it has: {self._describe()}")
            if begun is not None and current.begun != begun:
                raise ConflictError(f"{self.name}@{branch} was begun again meanwhile; nothing was changed")
            return {"version": None, "message": message, **more}

        log.append(build)

    def declare(self, branch: str) -> None:
        """Write a log of a branch that does not exist, unless there is a log of some branch.

        Call this before the commit of a version that is on no branch of the repository: readers then look at entries,
        see the module. For errors, see `Log.append`.
        """
        if not self.list_moves():
            self._log(branch).append(lambda _head: {"version": None, "message": "of another repository"}, head=0)

    def first_after(self, branch: str) -> int:
        """Return `Branch.after` of the first branch of this name, or 0 if not known. For errors, see `Log.read`."""
        try:
            first = _branch(branch, self._log(branch).read(1))
        except CorruptDataError:
            return 0
        return 0 if first is None else first.after

    def path_of(self, branch: str) -> str:
        """Return the path of the log of a branch."""
        return self._log(branch).path

    def _log(self, branch: str) -> Log:
        return Log(self._storage, f"{self._folder}/{check_tag(branch, 'branch')}")

    def _describe(self) -> str:
        return ", ".join(self.current()[0]) or "none yet"


def _branch(name: str, move: Entry) -> Branch | None:
    """Return the branch that a move begins; None if it ends it. Raise CorruptDataError: its fields are not valid."""
    version, after = move.content.get("version"), move.content.get("after", move.content.get("version"))
    if version is None and "version" in move.content:
        return None
    if type(version) is not int or type(after) is not int or not 0 < version <= after:
        raise CorruptDataError(f"entry {move.number} of branch {name!r} has no valid version: {version!r}, {after!r}")
    return Branch(name, move.number, version, after)


# All versions of a data set are entries of one log, so a number means one version, on whatever line. An entry on a
# branch has the field `branch`, the *line* `NAME/N`: its branch, and the number of the move that began it. So the
# versions of a branch that was removed are not those of a later branch of the same name. An entry without this field
# is on the main line.
#
# The head of a line is its newest version that is not removed. It follows from the log alone: the entry is the only
# commit, and nothing can be half-done. To find a head without reading all entries after it, an entry has the field
# `lines`: the newest version of each line before it. Its absence means that nothing is known, and the entry before is
# read next.


def branch_line(branch: str, begun: int) -> str:
    """Return the line of a branch that move `begun` of its log began; 0: no branch here, see `transfer_datasets`."""
    return f"{branch}/{begun}"


def branch_of(content: Mapping[str, Any]) -> str | None:
    """Return the branch that an entry was committed on, None for the main line. Raise CorruptDataError: not valid."""
    line = content.get(BRANCH)
    if line is None:
        return None
    match = _BRANCH_LINE.fullmatch(line) if isinstance(line, str) else None
    if not match or not is_name(match[1]):
        raise CorruptDataError(f"{line!r} is not a valid branch of a version, expected for example 'experiment/1'")
    return match[1]


@dataclass(frozen=True)
class LinePosition:
    """The line of an entry, and the newest version of each line before it, removed or not; {} if it is not known."""

    number: int
    line: str
    newest: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, entry: Entry) -> LinePosition:
        """Return the position that an entry records. Raise CorruptDataError: its fields are not valid."""
        branch = branch_of(entry.content)
        newest = entry.content.get(LINES, {})
        # Numbers below that of the entry: a search that follows them ends.
        if not isinstance(newest, Mapping) or not all(
            type(number) is int and 0 < number < entry.number for number in newest.values()
        ):
            raise CorruptDataError(f"the field {LINES!r} of entry {entry.number} is not valid: {newest!r}")
        return cls(entry.number, MAIN if branch is None else str(entry.content[BRANCH]), newest)

    def before(self, line: str) -> int:
        """Return the newest version before this entry that may be on `line`; 0: there is none."""
        if not self.newest:
            return self.number - 1
        if line in self.newest:
            return self.newest[line]
        branches = [number for known, number in self.newest.items() if known != MAIN]
        # The other branches are older than all in the list. Between these, there are only versions of listed lines.
        return min(branches) - 1 if line != MAIN and len(branches) >= _MAX_LINES else 0

    def after(self) -> dict[str, int]:
        """Return `lines` for the next entry; {} if this entry is on the main line, and knows of no branch."""
        return self.shorten({**self.newest, self.line: self.number}) if self.newest or self.line != MAIN else {}

    @staticmethod
    def shorten(newest: Mapping[str, int]) -> dict[str, int]:
        """Return the main line and the branches with the newest versions."""
        branches = sorted((number, line) for line, number in newest.items() if line != MAIN)[-_MAX_LINES:]
        main = {MAIN: newest[MAIN]} if MAIN in newest else {}
        return main | {line: number for number, line in branches}


ReadPosition = Callable[[int], LinePosition]


def find_head(
    read: ReadPosition, line: str, newest: int, removed: Collection[int] = (), *, after: int = 0
) -> int | None:
    """Return the newest version of a line that is not removed, or None.

    Args:
        read: returns the position of an entry.
        line: the line.
        newest: number of the newest entry to look at.
        removed: numbers of removed versions.
        after: entries up to this number are not on the line.

    Raises:
        CorruptDataError: an entry cannot be read, so its line is not known; or what `read` raises.
    """
    number = newest
    while number > after:
        if number in removed:
            number -= 1  # not read: it may be lost
            continue
        position = read(number)
        if position.line == line:
            return number
        number = position.before(line)
    return None


def find_lines(read: ReadPosition, newest: int, removed: Collection[int] = (), *, after: int = 0) -> dict[str, int]:
    """Return the newest version of each line up to entry `newest`; for the arguments and errors, see `find_head`.

    Here, no entry up to `after` is on a branch.
    """
    found: dict[str, int] = {}
    number = newest
    while number > after:
        try:
            position = read(number)
        except CorruptDataError:
            if number not in removed:
                raise
            number -= 1  # a lost version: it is no head again
            continue
        found.setdefault(position.line, number)
        if position.newest:
            for line, last in position.newest.items():
                found.setdefault(line, last)
            return found
        number -= 1
    if number:
        found.setdefault(MAIN, number)
    return found


def line_fields(line: str, newest: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of a new entry on a line; `newest` is the newest version of each line before it."""
    fields: dict[str, Any] = {LINES: LinePosition.shorten(newest)} if newest else {}
    return fields if line == MAIN else {**fields, BRANCH: line, "format": BRANCH_FORMAT}
