"""Carries branches of data sets to the target of a transfer, with the copy of the head as the head.

A version of a branch never becomes one of the main line of the target. If the target has the branch, copies are
committed to it, one after the other, if they continue its head. Otherwise they are on no branch, and the branch
begins at the copy of its head when all versions are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from datasvc.errors import ConflictError
from datasvc.models.transfer.entries import TargetLogs
from datasvc.repository import Repository, Resolved, parse_reference
from datasvc.repository.branching import create_branch
from datasvc.repository.logs.branches import BRANCH
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.lines.commit import ancestors_of


@dataclass(frozen=True)
class CarriedBranch:
    """A branch to carry to the target.

    Attributes:
        name: its name.
        head: its head at the source.
        is_new: whether the target does not have it yet.
    """

    name: str
    head: Resolved
    is_new: bool


def branches_in(source: Repository, refs: Sequence[str]) -> list[tuple[str, Resolved]]:
    """Return the branches among some references to versions of data sets, with their heads."""
    found = []
    for reference in map(parse_reference, refs):
        tag = None if reference.moves_back else reference.tag
        if tag is not None and tag in source.branches(reference.name):
            found.append((tag, source.resolve("datasets", f"{reference.name}@{tag}")))
    return list(dict.fromkeys(found))


def branch_refs(source: Repository, names: Sequence[str]) -> list[str]:
    """Return references to all branches of some data sets."""
    return [f"{name}@{branch}" for name in names for branch in source.branches(name)]


def plan_branches(logs: TargetLogs, branches: Sequence[tuple[str, Resolved]]) -> list[CarriedBranch]:
    """Return the branches to carry, and note in `logs.carried` those that the target has already.

    Args:
        logs: logs of the target.
        branches: names and heads at the source.

    Raises:
        ConflictError: the target has another tag or branch of this name.
        CorruptDataError, UnavailableError: see `Repository.branches`.
    """
    planned = []
    for branch, head in branches:
        name, at = logs.target_name(head), redact_url(logs.target.url)
        if branch in logs.target.tags("datasets", name, strict=True):
            raise ConflictError(
                f"cannot carry the branch {head.name}@{branch}: {at} has a tag {name}@{branch}; remove it there, "
                "or give the branch another name"
            )
        existing = logs.target.branches(name, strict=True).get(branch)
        if existing is not None and not _has(logs, name, branch, head):
            line = logs.source.branches(head.name)[branch].line
            logs.check_continues(head, branch)
            if logs.find(head) is not None or logs.content(head).get(BRANCH) != line:
                raise ConflictError(
                    f"the branch {name}@{branch} at {at} cannot be set to {head}, because that is not a new version "
                    f"of the branch: `datasvc branch {name} {branch} --remove` there, then copy it again"
                )
            logs.carried[head.name, line] = existing, head
        planned.append(CarriedBranch(branch, head, existing is None))
    return planned


def begin_branches(
    logs: TargetLogs, planned: Sequence[CarriedBranch], copies: Mapping[Resolved, Resolved]
) -> tuple[str, ...]:
    """Begin the new branches at the copies of their heads; return all branches that are at the target now.

    Raises:
        ConflictError: another process made a branch or tag of this name meanwhile; or see `Log.append`.
        UnknownOutcomeError, UnavailableError: see `Log.append`.
    """
    for each in planned:
        if each.is_new:
            create_branch(logs.target, str(copies[each.head]), each.name)
    return carried_names(logs, planned)


def carried_names(logs: TargetLogs, planned: Sequence[CarriedBranch]) -> tuple[str, ...]:
    """Return the references of the branches at the target."""
    return tuple(f"{logs.target_name(each.head)}@{each.name}" for each in planned)


def _has(logs: TargetLogs, name: str, branch: str, head: Resolved) -> bool:
    """Return whether a branch of the target has the copy of a version, as its head or as an ancestor of it."""
    copy = logs.find(head)
    if copy is None:
        return False
    return copy.version in ancestors_of(logs.target, logs.target.resolve("datasets", f"{name}@{branch}"))
