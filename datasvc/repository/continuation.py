"""What a new version of a data set continues: the head of its line, and the fields that put it on this line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.repository.logs.branches import Branch
from datasvc.repository.logs.heads import PositionReader
from datasvc.repository.logs.lines import MAIN, find_head, find_lines, line_fields
from datasvc.repository.logs.references import LineName
from datasvc.repository.repository import Repository
from datasvc.repository.resolved import Resolved


@dataclass(frozen=True)
class Continuation:
    """What the next entry of a log continues.

    Attributes:
        parent: head of its line; None if the line has no version that is not removed.
        main: head of the main line, or the newest entry if the main line has none; None for an empty log.
        fields: fields of the entry that name its line; {} on the main line, as long as there are no branches.
    """

    parent: Resolved | None
    main: Resolved | None
    fields: Mapping[str, Any]


def continue_line(repository: Repository, line: LineName, newest: int) -> Continuation:
    """Return what the entry after `newest` continues, if it is committed to a line.

    Versions are not listed: a listing of the store may lack the newest one, and an older one would be continued.

    Args:
        repository: repository of the data set.
        line: line that the entry is committed to.
        newest: number of the newest entry, 0 for none.

    Raises:
        NotFoundError: there is no such branch.
        CorruptDataError: an entry cannot be read, so it is not known which line it is on.
        ConfigError, UnavailableError: see `Log.read`.
    """
    name = line.name
    branch = None if line.branch is None else find_branch(repository, name, line.branch)
    read, removed = repository.positions(name), _removed(repository, name, newest)
    try:
        main = find_head(read, MAIN, newest, removed)
    except CorruptDataError:
        if repository.branch_logs(name).list_moves():
            raise
        # Without branches, all entries are on the main line: what needs the damaged one gets the error.
        main = next(number for number in range(newest, 0, -1) if number not in removed)
    parent = main
    if branch is not None:
        own = find_head(read, branch.line, newest, removed, after=branch.after)
        parent = branch.start if own is None else own
    return Continuation(
        None if parent is None else Resolved("datasets", name, parent),
        Resolved("datasets", name, main or newest) if newest else None,
        fields_on_line(repository, name, MAIN if branch is None else branch.line, newest, read=read),
    )


def fields_on_line(
    repository: Repository, name: str, line: str, newest: int, *, read: PositionReader | None = None
) -> dict[str, Any]:
    """Return the fields that put the entry after `newest` on a line, of a branch that need not exist.

    Args:
        repository: repository of the data set.
        name: name of the data set.
        line: see `lines`.
        newest: number of the newest entry, 0 for none.
        read: reader of the entries; None for a new one.

    Raises: see `continue_line`.
    """
    read = repository.positions(name) if read is None else read
    lines: Mapping[str, int] = {}
    try:
        lines = read(newest).after() if newest else {}
    except CorruptDataError:
        if line != MAIN and newest not in _removed(repository, name, newest):
            raise
        # The field may be left out: the search for a head then looks at the entry before.
    if not lines and line != MAIN:
        # All versions are on the main line; or a release without branches has committed the newest entry.
        first = _first_on_branch(repository, name, newest)
        lines = find_lines(read, newest, _removed(repository, name, newest), after=first - 1)
    return line_fields(line, lines)


def find_branch(repository: Repository, name: str, branch: str) -> Branch:
    """Return a branch of a data set. Raise NotFoundError, which lists the branches, if there is no such branch."""
    branches = repository.branch_logs(name)
    found = branches.find(branch)
    if found is None:
        raise NotFoundError(
            f"{name} has no branch {branch!r}; it has: {', '.join(branches.current()[0]) or 'none yet'}; "
            f"`datasvc branch {name} {branch}` makes it"
        )
    return found


def _removed(repository: Repository, name: str, newest: int) -> frozenset[int]:
    return repository.removals("datasets", name).removed(range(1, newest + 1))


def _first_on_branch(repository: Repository, name: str, newest: int) -> int:
    """Return a number such that no version before it is on a branch."""
    branches = repository.branch_logs(name)
    firsts = [branches.first_after(branch) for branch in branches.list_moves()]
    return 1 + min(firsts, default=newest)
