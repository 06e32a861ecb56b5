"""Copies versions of data sets, optionally with their ancestors and tags: `datasvc push` and `datasvc pull`.

The copies keep their identity, as those of models do, see `copy_versions`. So a version that was copied with a model
is not copied again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from datasvc.models.transfer.carry_branches import (
    begin_branches,
    branch_refs,
    branches_in,
    carried_names,
    plan_branches,
)
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
from datasvc.repository import Kind, Repository
from datasvc.repository.logs.references import refuse_text

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
