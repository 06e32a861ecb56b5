"""Verifies a data-set version, and replaces its bad objects by good copies from other repositories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, Repository
from datasvc.repository.logs.references import refuse_text
from datasvc.repository.repair import Repair, repair_objects
from datasvc.shards.versions.verify import DatasetProblem, VerifyReport, verify

# Not "contradictory": such an object matches its digest, so a copy has the same bytes.
_REPAIRABLE: Final = ("missing", "truncated", "changed")


@dataclass(frozen=True)
class DatasetRepairReport:
    """Result of `repair_dataset`.

    Attributes:
        verified: report of the last pass, to which the problems of earlier passes were added.
        repairs: result for each object whose repair was tried.
        remaining: problems that could not be repaired.
    """

    verified: VerifyReport
    repairs: tuple[Repair, ...]
    remaining: tuple[DatasetProblem, ...]


def repair_dataset(
    repository: Repository,
    ref: str,
    copies: Sequence[Repository | str],
    *,
    deep: bool = False,
    progress: Progress = NO_PROGRESS,
) -> DatasetRepairReport:
    """Verify a version and repair its bad objects, in passes, until a pass finds nothing that was not tried.

    Several passes are needed because a bad shard table hides its shards.

    Args:
        repository: repository of the version.
        ref: the version.
        copies: other repositories or their URLs, in the order of their use; without any, nothing is repaired.
        deep: read every byte, see `verify`. Without it, a changed byte of a blob is not found.
        progress: counts the bytes of each checked shard and of each copied part; `begin` is called in each pass.

    Raises:
        ConfigError: this repository is not writable; or see `verify`.
        NotFoundError, CorruptDataError, UnavailableError: see `verify` and `Repository.open`.
    """
    refuse_text(copies, "copies", "repositories")
    version = str(repository.resolve("datasets", ref))
    opened = [copy if isinstance(copy, Repository) else Repository.open(copy) for copy in copies]
    last_pass = verify(repository, version, deep=deep, progress=progress)
    problems = dict.fromkeys(last_pass.problems)  # an ordered set of the problems of all passes
    repairs: dict[Digest, Repair] = {}
    while opened:
        # Each object is tried once: the same copies would fail again.
        untried = [
            problem.digest
            for problem in last_pass.problems
            if problem.kind in _REPAIRABLE and problem.digest not in repairs
        ]
        tried = repair_objects(repository, untried, opened, progress)
        repairs |= {result.digest: result for result in tried}
        if all(result.failure is not None for result in tried):
            break
        last_pass = verify(repository, version, deep=deep, progress=progress)
        problems |= dict.fromkeys(last_pass.problems)
    # The last pass has read the repaired objects, so it counts shards that the first one could not.
    verified = replace(last_pass, problems=tuple(problems))
    return DatasetRepairReport(verified, tuple(repairs.values()), last_pass.problems)
