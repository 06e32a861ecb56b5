"""Lines of the versions of a data set: the main line, and the branches.

All versions of a data set are entries of one log, so a number means one version, on whatever line. An entry on a
branch has the field `branch`, the *line* `NAME/N`: its branch, and the number of the move that began it (see
`branches`). So the versions of a branch that was removed are not those of a later branch of the same name. An entry
without this field is on the main line.

The head of a line is its newest version that is not removed. It follows from the log alone: the entry is the only
commit, and nothing can be half-done. To find a head without reading all entries after it, an entry has the field
`lines`: the newest version of each line before it. Its absence means that nothing is known, and the entry before is
read next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from datasvc.errors import CorruptDataError
from datasvc.repository.logs.log import BRANCH_FORMAT, Entry
from datasvc.repository.logs.references import is_name

BRANCH: Final = "branch"
LINES: Final = "lines"
MAIN: Final = ""
"""The main line, which is what a name alone refers to."""
_BRANCH_LINE: Final = re.compile(r"([^/]+)/(0|[1-9][0-9]{0,8})")
# Branches in `lines`, those with the newest versions, so that an entry stays small beside thousands of old branches.
_MAX_LINES: Final = 64


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
    """The line of an entry, and the newest version of each line before it.

    Attributes:
        number: number of the entry.
        line: its line.
        newest: newest version by line, removed or not; {} if it is not known.
    """

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
