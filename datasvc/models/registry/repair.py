"""Verifies model versions, and replaces their bad objects by good copies from other repositories."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from datasvc.models.registry.survey import ModelProblem
from datasvc.models.registry.verify import ModelVerifyReport, resolve_versions, verify
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, Repository, Resolved
from datasvc.repository.logs.references import refuse_text
from datasvc.repository.repair import Repair, repair_objects

# Not "contradictory": such an object matches its digest, so a copy has the same bytes. "not trusted" is for entries.
_REPAIRABLE: Final = ("missing", "changed", "unreadable")


@dataclass(frozen=True)
class RepairReport:
    """Result of `verify_and_repair`.

    Attributes:
        verified: report of the first pass, to which the problems of later passes were added.
        repairs: result for each object whose repair was tried.
        remaining: problems that could not be repaired.
    """

    verified: ModelVerifyReport
    repairs: tuple[Repair, ...]
    remaining: tuple[ModelProblem, ...]


def repair(
    repository: Repository,
    problems: Iterable[ModelProblem],
    copies: Sequence[Repository],
    progress: Progress = NO_PROGRESS,
) -> list[Repair]:
    """Replace missing, changed and unreadable objects by good copies. A failed repair does not stop the others.

    Args:
        repository: repository with the problems.
        problems: problems that `verify` returned for it.
        copies: other repositories, in the order in which they are tried.
        progress: counts the bytes of each part that was copied.

    Returns:
        One result per object.

    Raises:
        ConfigError: this repository is not writable.
    """
    digests = (problem.digest for problem in problems if problem.kind in _REPAIRABLE)
    return repair_objects(repository, (digest for digest in digests if digest is not None), copies, progress)


def verify_and_repair(
    repository: Repository,
    versions: str | Iterable[str | Resolved],
    copies: Sequence[Repository | str],
    *,
    deep: bool = False,
    trusted_keys: Sequence[str | Path] | None = None,
    progress: Progress = NO_PROGRESS,
) -> RepairReport:
    """Verify versions and repair bad objects, in passes, until a pass finds no further problem.

    Several passes are needed, because the objects of a bad tensor table are unknown until the table is repaired.

    Arguments and errors are those of `verify` and `repair`. `copies` are other repositories or their URLs; without
    any, nothing is repaired. `progress` begins once per pass.
    """
    refuse_text(copies, "copies", "repositories")
    by_name = {str(version): version for version in resolve_versions(repository, versions)}
    opened = [copy if isinstance(copy, Repository) else Repository.open(copy) for copy in copies]
    first_pass = verify(repository, by_name.values(), deep=deep, trusted_keys=trusted_keys, progress=progress)
    problems, remaining = list(first_pass.problems), list(first_pass.problems)
    repairs: dict[Digest, Repair] = {}  # by object
    while opened:
        # Try each object once: the same copies would fail again.
        untried = [problem for problem in remaining if problem.digest not in repairs]
        tried = repair(repository, untried, opened, progress)
        repairs.update((result.digest, result) for result in tried)
        good = {result.digest for result in tried if result.failure is None}
        repaired = [problem for problem in remaining if problem.digest in good and problem.kind in _REPAIRABLE]
        remaining = [problem for problem in remaining if problem not in repaired]
        # A bad object can hide problems of its versions. An object of tensors can do so only with `deep`, because
        # only then its tensors are decoded. Verify the versions (`hit`) of the repaired objects again.
        hit = {version for problem in repaired if deep or problem.role != "tensors" for version in problem.hit}
        if not hit:
            break
        again = [version for name, version in by_name.items() if name in hit]
        found = verify(repository, again, deep=deep, trusted_keys=trusted_keys, progress=progress).problems
        known = set(map(_identity, remaining))
        new = [problem for problem in found if _identity(problem) not in known]
        remaining += new
        problems += new
    return RepairReport(replace(first_pass, problems=tuple(problems)), tuple(repairs.values()), tuple(remaining))


def _identity(problem: ModelProblem) -> tuple[object, ...]:
    # Without `hit`: a later pass verifies fewer versions, so it lists fewer of them for the same problem.
    return problem.role, problem.kind, problem.digest, problem.detail
