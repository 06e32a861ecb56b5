"""Replace bad objects by good copies from other repositories; the bad bytes are moved to a quarantine.

Only objects can be repaired, because a copy can be checked against the digest that names it. An entry has no digest:
restore it from a backup of the same repository.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final, cast

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.models.registry.survey import ModelProblem
from datasvc.models.registry.verify import ModelVerifyReport, resolve_versions, verify
from datasvc.models.restoring.failover_source import find_damage
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, Objects, Repository, Resolved
from datasvc.repository.objects.intact import QUARANTINE, keep_aside
from datasvc.repository.store.retries import map_exceptions
from datasvc.threads import run_in_threads

_OBJECTS_AT_ONCE: Final = 4
_PART_BYTES: Final = 8 << 20
# Not "contradictory": such an object matches its digest, so a copy has the same bytes. "not trusted" is for entries.
_REPAIRABLE: Final = ("missing", "changed", "unreadable")


@dataclass(frozen=True)
class Repair:
    """Result of the repair of one object.

    Attributes:
        kept_at: location of the bad bytes in the quarantine; None if there were no bytes, or nothing was replaced.
        failure: why the object is still bad; None if it is good now.
    """

    digest: Digest
    kept_at: str | None = None
    failure: str | None = None


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
    digests = dict.fromkeys(problem.digest for problem in problems if problem.kind in _REPAIRABLE)
    arguments = [(repository, digest, copies, progress) for digest in digests if digest is not None]
    return run_in_threads(_repair_one, arguments, _OBJECTS_AT_ONCE)


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

    Several passes are needed because a bad tensor table hides its objects: they can be checked only after the table
    is repaired.

    Arguments and errors are those of `verify` and `repair`. `copies` are other repositories or their URLs; without
    any, nothing is repaired. `progress` begins once per pass.
    """
    by_name = {str(version): version for version in resolve_versions(repository, versions)}
    opened = [copy if isinstance(copy, Repository) else Repository.open(copy) for copy in copies]
    first_pass = verify(repository, by_name.values(), deep=deep, trusted_keys=trusted_keys, progress=progress)
    problems, remaining, repairs = list(first_pass.problems), list(first_pass.problems), dict[Digest, Repair]()
    while opened:
        # Try each object once: the same copies would fail again.
        untried = [problem for problem in remaining if problem.digest not in repairs]
        tried = repair(repository, untried, opened, progress)
        repairs.update((result.digest, result) for result in tried)
        good = {result.digest for result in tried if result.failure is None}
        repaired = [problem for problem in remaining if problem.digest in good and problem.kind in _REPAIRABLE]
        remaining = [problem for problem in remaining if problem not in repaired]
        # A bad object can hide problems of its versions. An object of tensors can do so only with `deep`, because
        # only then its tensors are decoded.
        hidden = {version for problem in repaired if deep or problem.role != "tensors" for version in problem.hit}
        if not hidden:
            break
        again = [version for name, version in by_name.items() if name in hidden]
        more = verify(repository, again, deep=deep, trusted_keys=trusted_keys, progress=progress).problems
        listed = set(map(_identity, remaining))
        new = [problem for problem in more if _identity(problem) not in listed]
        remaining += new
        problems += new
    return RepairReport(replace(first_pass, problems=tuple(problems)), tuple(repairs.values()), tuple(remaining))


def _identity(problem: ModelProblem) -> tuple[object, ...]:
    # Without `hit`: a later pass verifies fewer versions, so it lists fewer of them for the same problem.
    return problem.role, problem.kind, problem.digest, problem.detail


def _repair_one(repository: Repository, digest: Digest, copies: Sequence[Repository], progress: Progress) -> Repair:
    if find_damage(repository.objects, digest) is None:
        return Repair(digest)  # another process has repaired it since the check
    failures = []
    for copy in copies:
        try:
            kept_at = _replace(repository, digest, copy.objects, progress)
        except (NotFoundError, CorruptDataError, UnavailableError) as error:
            failures.append(str(error))
        else:
            return Repair(digest, kept_at)
    return Repair(digest, failure="; ".join(failures) or "there is no other repository to copy it from")


def _replace(repository: Repository, digest: Digest, source: Objects, progress: Progress) -> str | None:
    """Copy and verify an object, then replace the bad one; return the location of the bad bytes."""
    objects = repository.objects
    writer = objects.begin()
    try:
        try:
            size_bytes = source.size(digest)
            if size_bytes is None:
                raise NotFoundError(f"{source.location(digest)} is missing as well")
            source.fetch(digest, size_bytes, cast("BinaryIO", writer), progress=progress)
        except ConfigError as error:
            # A copy that cannot be read must not end the repair: from here, ConfigError means that this repository is
            # not writable.
            raise UnavailableError(str(error)) from error
        with map_exceptions("write", str(writer.path)):
            writer.sync()
        # Quarantine before the replacement, so that a crash between the two never loses the bad bytes.
        kept_at = _quarantine(repository, digest)
        repository.storage.adopt(Objects.path(digest), writer.path)
    finally:
        objects.abandon(writer)
    return kept_at


def _quarantine(repository: Repository, digest: Digest) -> str | None:
    """Link or copy the bad bytes of an object into the quarantine; return the location, or None if there are none."""
    storage, path = repository.storage, Objects.path(digest)
    size_bytes = storage.size(path)
    if size_bytes is None:
        return None
    local = storage.local_path(path)
    if local is not None:
        root = storage.local_path("")
        assert root is not None
        return str(keep_aside(root, local))
    # A remote store has no links, so the bytes are copied.
    kept = f"{QUARANTINE}/{digest}.{secrets.token_hex(4)}"
    writer = repository.objects.begin()
    try:
        for offset in range(0, size_bytes, _PART_BYTES):
            content = storage.read_range(path, offset, min(_PART_BYTES, size_bytes - offset))
            if not content:
                raise UnavailableError(f"{storage.location(path)} ends before its {size_bytes} bytes")
            writer.write(content)
        with map_exceptions("write", str(writer.path)):
            writer.sync()
        storage.adopt(kept, writer.path)
    finally:
        repository.objects.abandon(writer)
    return storage.location(kept)
