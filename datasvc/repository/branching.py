"""Create and remove branches of data sets, and find what a new version on a line continues.

Invariants: a branch begins at a version that is not removed, and has another name than every tag. As for tags (see
`repository`), each of two concurrent writers reads what the other writes after its own commit, and reverts this
commit if there is a conflict.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError, UnreadableVersionWarning
from datasvc.repository.logs.branches import MAIN, RESERVED, Branch, check_branch, find_head, find_lines, line_fields
from datasvc.repository.logs.heads import PositionReader
from datasvc.repository.logs.log import Entry
from datasvc.repository.logs.references import LineName, check_name
from datasvc.repository.repository import Repository
from datasvc.repository.resolved import Resolved


@dataclass(frozen=True)
class BranchState:
    """A branch of a data set as it is now: its newest version, and the version at which it begins."""

    name: str
    head: Resolved
    start: Resolved


def create_branch(repository: Repository, ref: str, branch: str, *, message: str = "") -> Resolved:
    """Create a branch that begins at a version, and return that version, the head of the branch; nothing is copied.

    Args:
        repository: repository of the data set.
        ref: version at which the branch begins, of any line: NAME, NAME@VERSION, NAME@TAG or NAME@BRANCH.
        branch: name of the branch; "main" and "latest" mean the main line, and cannot be used.
        message: text stored with the branch.

    Raises:
        NotFoundError: `ref` does not resolve.
        ConfigError: the name is not valid, or a tag has it.
        ConflictError: the branch exists; or a tag of this name was set, or the version removed, at the same time.
        CorruptDataError: a tag or a move of the branch cannot be read.
        UnknownOutcomeError, UnavailableError: see `Log.append`.
    """
    check_branch(branch)
    start = repository.resolve("datasets", ref)
    if branch in repository.tags("datasets", start.name, strict=True):
        raise ConfigError(
            f"{start.name} has a tag {branch!r}: choose another name for the branch, or remove the tag: `datasvc tag "
            f"{start.name} {branch} --remove`"
        )
    newest = repository.versions("datasets", start.name).head()
    branches = repository.branch_logs(start.name)
    begun = branches.begin(branch, start.version, max(newest, start.version), message)
    conflict = _find_conflict(repository, start, branch)
    if conflict is not None:
        # Another process may have ended it already, for the same reason.
        with suppress(NotFoundError, ConflictError):
            branches.end(branch, begun=begun.begun, message=conflict)
        raise ConflictError(f"{conflict} while the branch {branch!r} was created; the branch was removed again")
    return start


def remove_branch(repository: Repository, name: str, branch: str, *, message: str = "") -> BranchState | None:
    """Remove a branch. Its versions stay, by number, until they are removed; its history stays too.

    A version that another process commits to the branch at the same time stays as well, but is on no branch then.

    Returns:
        The branch before its removal; None if it could not be read.

    Raises:
        NotFoundError: there is no such branch.
        ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`.
    """
    branches = repository.branches(check_name(name, "data set"))
    known = branches.get(branch)
    state = None if known is None else read_branches(repository, name).get(branch)
    repository.branch_logs(name).end(branch, begun=None if known is None else known.begun, message=message)
    return state


def read_branches(repository: Repository, name: str) -> dict[str, BranchState]:
    """Return the branches of a data set by name, sorted.

    A branch that cannot be read is left out with an `UnreadableVersionWarning`.

    Raises:
        ConfigError: `name` is not a valid name.
        NotFoundError: there is no such data set.
        UnavailableError: the store does not respond.
    """
    heads = repository.known_state("datasets", check_name(name, "data set")).branches
    states = {}
    for branch, begun in repository.branches(name).items():
        head = heads[branch] if branch in heads else _read_head(repository, name, branch)
        if head is not None:
            start = Resolved("datasets", name, begun.start)
            states[branch] = BranchState(branch, Resolved("datasets", name, head), start)
    return states


def _read_head(repository: Repository, name: str, branch: str) -> int | None:
    """Return the head of a branch, None if the branch has ended or, with a warning, if the head is not known."""
    try:
        return repository.resolve("datasets", f"{name}@{branch}").version
    except NotFoundError:
        return None
    except (CorruptDataError, ConfigError, ConflictError) as error:
        message = f"{name}@{branch} is left out: {error}"
        warnings.warn(UnreadableVersionWarning(f"{name}@{branch}", message), stacklevel=3)
        return None


def branch_history(repository: Repository, name: str, branch: str) -> list[Entry]:
    """Return the moves of a branch, oldest first: where it began, and where it ended.

    Raises:
        NotFoundError: the branch never existed.
        CorruptDataError, ConfigError, UnavailableError: see `Log.entries`.
    """
    moves = repository.branch_logs(name).history(branch)
    if not moves:
        find_branch(repository, name, branch)
    return moves


def refuse_branch(repository: Repository, name: str, tag: str | None, advice: str) -> None:
    """Raise ConfigError if `tag`, from a reference to a version of a data set, is a branch."""
    if tag is not None and tag in repository.branches(name):
        raise ConfigError(f"{name}@{tag} is a branch, not one version; {advice}")


def branches_at(repository: Repository, name: str, versions: frozenset[int] | set[int]) -> dict[str, Branch]:
    """Return the branches that begin at one of the versions; for errors, see `Repository.branches` with `strict`."""
    branches = repository.branches(name, strict=True)
    return {branch: found for branch, found in branches.items() if found.start in versions}


def _find_conflict(repository: Repository, start: Resolved, branch: str) -> str | None:
    """Return what makes a branch that was just committed invalid, in words."""
    if start.version in repository.removals("datasets", start.name).removed([start.version]):
        return f"{start} was removed"
    if branch in repository.tags("datasets", start.name, strict=True):
        return f"a tag {branch!r} of {start.name} was set"
    return None


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
    """Return what the entry after `newest` (0: none) continues, if it is committed to a line.

    Versions are not listed: a listing of the store may lack the newest one, and an older one would be continued.

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
    """Return the fields that put the entry after `newest` (0: none) on a line, of a branch that need not exist.

    For the errors, see `continue_line`.
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
        branches = repository.branch_logs(name)
        after = min((branches.first_after(branch) for branch in branches.list_moves()), default=newest)
        lines = find_lines(read, newest, _removed(repository, name, newest), after=after)
    return line_fields(line, lines)


def find_branch(repository: Repository, name: str, branch: str) -> Branch:
    """Return a branch of a data set. Raise NotFoundError, which lists the branches, if there is no such branch."""
    branches = repository.branch_logs(name)
    found = branches.find(branch)
    if found is None:
        advice = (
            f"the main line is {name} alone" if branch in RESERVED else f"`datasvc branch {name} {branch}` makes it"
        )
        raise NotFoundError(
            f"{name} has no branch {branch!r}; it has: {', '.join(branches.current()[0]) or 'none yet'}; {advice}"
        )
    return found


def _removed(repository: Repository, name: str, newest: int) -> frozenset[int]:
    return repository.removals("datasets", name).removed(range(1, newest + 1))
