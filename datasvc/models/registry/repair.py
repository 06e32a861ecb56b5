"""Put good copies of objects, from other repositories, in the place of bad ones, which are kept aside, never lost."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO, Final, cast

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.models.registry.survey import ModelProblem
from datasvc.models.registry.verify import ModelVerifyReport, verify
from datasvc.models.restoring.failover_source import find_damage
from datasvc.models.tensors.threads import run_in_threads
from datasvc.models.versions.signing_keys import PublicKey
from datasvc.repository import Digest, Objects, Repository, Resolved
from datasvc.repository.objects.intact import QUARANTINE, keep_aside
from datasvc.repository.store.retries import map_exceptions

_OBJECTS_AT_ONCE: Final = 4
_PART_BYTES: Final = 8 << 20
_REPAIRABLE: Final = ("missing", "changed", "unreadable")


@dataclass(frozen=True)
class Repair:
    """What became of one bad object.

    Attributes:
        digest: its name.
        kept_at: where the bad bytes lie now; None where there were none, or nothing was done.
        failure: why it is still bad; None once it is good.
    """

    digest: Digest
    kept_at: str | None = None
    failure: str | None = None


@dataclass(frozen=True)
class RepairReport:
    """What `verify_and_repair` found and did.

    Attributes:
        found: the first pass, with the problems of all passes.
        repairs: what became of each object that could be repaired.
        left: problems that are still there.
    """

    found: ModelVerifyReport
    repairs: tuple[Repair, ...]
    left: tuple[ModelProblem, ...]


def repair(
    repository: Repository,
    problems: Iterable[ModelProblem],
    copies: Sequence[Repository],
    report: Callable[[int], None] | None = None,
) -> list[Repair]:
    """Copy good objects over missing, changed and unreadable ones; all are tried, whatever fails.

    Only objects can be repaired: their name says what they have to be. An entry could be another commit's; bring it
    back from a backup of this very repository.

    Args:
        repository: with the problems.
        problems: what `verify` found in it.
        copies: other repositories, in the order in which they are asked.
        report: called with the bytes of each part copied, from several threads.

    Returns:
        What was done, by object.

    Raises:
        ConfigError: this repository may not be written to.
    """
    digests = dict.fromkeys(
        problem.digest for problem in problems if problem.digest is not None and problem.kind in _REPAIRABLE
    )
    arguments = [(repository, digest, copies, report) for digest in digests]
    return run_in_threads(_repair_one, arguments, _OBJECTS_AT_ONCE)


def verify_and_repair(
    repository: Repository,
    versions: Iterable[Resolved],
    copies: Sequence[Repository],
    *,
    deep: bool = False,
    trusted: Sequence[PublicKey] = (),
    begin: Callable[[int], None] | None = None,
    report: Callable[[int], None] | None = None,
) -> RepairReport:
    """Verify versions and repair what is bad; then verify again what had been hidden, until nothing more is found.

    Nobody can say of a table that is bad which objects it names: those are looked at once it is repaired.

    Args:
        repository: with the versions.
        versions: which.
        copies: as of `repair`; where there are none nothing is repaired.
        deep: as of `verify`, like the rest.
        trusted: see there.
        begin: called anew for every pass.
        report: called with the bytes read, decoded or copied.

    Raises: as `verify` and `repair`.
    """
    by_name = {str(version): version for version in versions}
    done = verify(repository, by_name.values(), deep=deep, trusted=trusted, begin=begin, report=report)
    found, left, repairs = list(done.problems), list(done.problems), dict[Digest, Repair]()
    while copies:
        new = repair(repository, [each for each in left if each.digest not in repairs], copies, report)
        repairs.update((each.digest, each) for each in new)
        good = {each.digest for each in new if each.failure is None}
        mended = [each for each in left if each.digest in good and each.kind in _REPAIRABLE]
        left = [each for each in left if each not in mended]
        hidden = {version for each in mended if deep or each.role != "tensors" for version in each.hit}
        if not hidden:
            break
        again = [version for name, version in by_name.items() if name in hidden]
        more = verify(repository, again, deep=deep, trusted=trusted, begin=begin, report=report).problems
        known = {(each.role, each.kind, each.digest, each.detail) for each in left}
        unknown = [each for each in more if (each.role, each.kind, each.digest, each.detail) not in known]
        left += unknown
        found += unknown
    return RepairReport(replace(done, problems=tuple(found)), tuple(repairs.values()), tuple(left))


def _repair_one(
    repository: Repository, digest: Digest, copies: Sequence[Repository], report: Callable[[int], None] | None
) -> Repair:
    if find_damage(repository.objects, digest) is None:
        return Repair(digest)  # somebody else was faster
    failures = []
    for copy in copies:
        try:
            kept_at = _replace(repository, digest, copy.objects, report)
        except (NotFoundError, CorruptDataError, UnavailableError) as error:
            failures.append(str(error))
        else:
            return Repair(digest, kept_at)
    return Repair(digest, failure="; ".join(failures) or "there is no other repository to copy it from")


def _replace(
    repository: Repository, digest: Digest, source: Objects, report: Callable[[int], None] | None
) -> str | None:
    """Copy an object, verified, then put it in the bad one's place; returns where that is kept."""
    objects, storage = repository.objects, repository.storage
    writer = objects.begin()
    try:
        try:
            size_bytes = source.size(digest)
            if size_bytes is None:
                raise NotFoundError(f"{source.location(digest)} is missing too")
            source.fetch(digest, size_bytes, cast("BinaryIO", writer), report=report)
        except ConfigError as error:  # refused there; here it would mean that nothing at all can be repaired
            raise UnavailableError(str(error)) from error
        with map_exceptions("write", str(writer.path)):
            writer.sync()
        # Kept before it is replaced: at every instant one of both names leads to the bad bytes.
        kept_at = _keep(repository, digest)
        storage.adopt(Objects.path(digest), writer.path)
    finally:
        objects.abandon(writer)
    return kept_at


def _keep(repository: Repository, digest: Digest) -> str | None:
    """Give the bad bytes of an object a second name, in the quarantine; None where there are none."""
    storage, path = repository.storage, Objects.path(digest)
    size_bytes = storage.size(path)
    if size_bytes is None:
        return None
    local = storage.local_path(path)
    if local is not None:
        root = storage.local_path("")
        assert root is not None
        return str(keep_aside(root, local))
    kept = f"{QUARANTINE}/{digest}.{secrets.token_hex(4)}"
    _copy_remote(repository, path, size_bytes, kept)
    return storage.location(kept)


def _copy_remote(repository: Repository, path: str, size_bytes: int, kept: str) -> None:
    writer = repository.objects.begin()
    try:
        for offset in range(0, size_bytes, _PART_BYTES):
            content = repository.storage.read_range(path, offset, min(_PART_BYTES, size_bytes - offset))
            if not content:
                raise UnavailableError(f"{repository.storage.location(path)} ends before its {size_bytes} bytes")
            writer.write(content)
        with map_exceptions("write", str(writer.path)):
            writer.sync()
        repository.storage.adopt(kept, writer.path)
    finally:
        repository.objects.abandon(writer)
