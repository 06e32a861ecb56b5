"""Create and remove branches of data sets.

Invariants: a branch begins at a version that is not removed, and has another name than every tag. As for tags (see
`repository`), each of two concurrent writers reads what the other writes after its own commit, and reverts this
commit if there is a conflict.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import dataclass

from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError, UnreadableVersionWarning
from datasvc.repository.continuation import find_branch
from datasvc.repository.logs.branches import Branch, check_branch
from datasvc.repository.logs.log import Entry
from datasvc.repository.logs.references import check_name
from datasvc.repository.repository import Repository
from datasvc.repository.resolved import Resolved


@dataclass(frozen=True)
class BranchState:
    """A branch of a data set as it is now.

    Attributes:
        name: its name.
        head: its newest version.
        start: version at which it begins.
    """

    name: str
    head: Resolved
    start: Resolved


def create_branch(repository: Repository, ref: str, branch: str, *, message: str = "") -> Resolved:
    """Create a branch that begins at a version; nothing is copied.

    Args:
        repository: repository of the data set.
        ref: version at which the branch begins, of any line: NAME, NAME@VERSION, NAME@TAG or NAME@BRANCH.
        branch: name of the branch; "main" and "latest" mean the main line, and cannot be used.
        message: text stored with the branch.

    Returns:
        The version that `ref` resolves to, now the head of the branch.

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

    Args:
        repository: repository of the data set.
        name: name of the data set.
        branch: name of the branch.
        message: text stored with the removal.

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
