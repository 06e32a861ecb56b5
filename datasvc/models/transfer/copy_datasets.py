"""Copies versions of data sets, optionally with their ancestors and tags: `datasvc push` and `datasvc pull`.

The copies keep their identity, as those of models do, see `copy_versions`. So a version that was copied with a model
is not copied again. A branch gets the copy of its head as its head, and a version of a branch never becomes one of
the main line of the target. If the target has the branch, copies are committed to it, one after the other, if they
continue its head. Otherwise they are on no branch, and the branch begins when all versions are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from datasvc.errors import ConflictError
from datasvc.models.transfer.copy_in_order import (
    TransferReport,
    copy_in_order,
    name_at_target,
    open_both,
    read_parents,
    sort_topologically,
)
from datasvc.models.transfer.entries import TargetLogs
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Kind, Repository, Resolved, parse_reference
from datasvc.repository.branching import create_branch
from datasvc.repository.logs.branches import BRANCH
from datasvc.repository.logs.references import refuse_text
from datasvc.repository.store.redaction import redact_url
from datasvc.shards.lines.commit import ancestors_of

_ADVICE: Final = "--name NAME, name='NAME'"


def transfer_datasets(
    source: Repository | str,
    target: Repository | str,
    refs: Sequence[str],
    *,
    name: str | None = None,
    with_parents: bool = False,
    with_tags: bool = False,
    with_branches: bool = False,
    dry_run: bool = False,
    progress: Progress = NO_PROGRESS,
) -> TransferReport:
    """Copy versions of data sets to another repository, each with all its shards.

    Only objects that the target lacks are copied, and each is verified. The entry at the target gets a field
    `origin`, see `transfer`. A parent without a copy is left out; a version needs none to be read.

    Args:
        source: repository to copy from, or its URL.
        target: repository to copy to, or its URL.
        refs: versions to copy: NAME, NAME@VERSION, NAME@TAG; or NAME@BRANCH to carry the branch. At a target that has
            the branch, its head must be an ancestor of the copied version.
        name: name of the data set at the target, by default the same; if given, all `refs` must be of one data set.
        with_parents: whether to copy also the versions that these continue, as far as they are in the source.
        with_tags: whether to copy also the tags of the copied versions. A tag that the target has is not moved.
        with_branches: whether to carry also all branches of these data sets.
        dry_run: whether to write nothing, and return what would be copied.
        progress: counts the bytes of each object once the target has it, copied or not.

    Returns:
        The versions at the target, and the amount of data copied. Existing versions are not changed.

    Raises:
        NotFoundError: a version or one of its objects does not exist, or an object disappeared at the target.
        CorruptDataError: an entry, table or object is damaged at the source; its version is not committed.
        ConfigError: source and target are the same repository; a name is not valid; or the target has an unrelated
            data set of the same name.
        ConflictError: a tag to copy points at another version of the target, or a branch there has a version that the
            copied one does not continue; nothing was copied.
        ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`. Versions that were committed before
            stay; repeat the call to continue.
    """
    refuse_text(refs, "refs")
    source, target = open_both(source, target)
    requested = [source.resolve("datasets", ref) for ref in refs]
    if with_branches:
        refs = [*refs, *branch_refs(source, sorted({version.name for version in requested}))]
        requested = [source.resolve("datasets", ref) for ref in refs]
    logs = TargetLogs(source, target, name_at_target(requested, name), advice=_ADVICE)
    versions = sort_topologically(read_parents(source, requested, logs.content, with_ancestors=with_parents))
    kind: Kind | None = "datasets" if with_tags else None
    branches = plan_branches(logs, branches_in(source, refs))
    report = copy_in_order(logs, versions, tagged_kind=kind, dry_run=dry_run, progress=progress)
    if dry_run:
        return replace(report, branches=carried_names(logs, branches))
    copies = {copy.source: copy.target for copy in report.versions}
    return replace(report, branches=begin_branches(logs, branches, copies))


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
        ConflictError: another process has made a branch or tag of this name since the plan; or see `Log.append`.
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
