"""Replace bad objects by good copies from other repositories; the bad bytes are moved to a quarantine.

Only objects can be repaired, because a copy can be checked against the digest that names it. An entry has no digest:
restore it from a backup of the same repository.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final, cast

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository.objects.intact import QUARANTINE, keep_aside
from datasvc.repository.objects.objects import Digest, Objects
from datasvc.repository.objects.presence import find_damage
from datasvc.repository.repository import Repository
from datasvc.repository.store.retries import map_exceptions
from datasvc.threads import run_in_threads

_OBJECTS_AT_ONCE: Final = 4
_PART_BYTES: Final = 8 << 20


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


def repair_objects(
    repository: Repository, digests: Iterable[Digest], copies: Sequence[Repository], progress: Progress = NO_PROGRESS
) -> list[Repair]:
    """Replace bad objects by good copies; return a result per distinct object. A failure does not stop the others.

    Args:
        repository: repository with the bad objects.
        digests: digests of objects that may be bad; one that is good is left as it is.
        copies: other repositories, in the order in which they are tried.
        progress: counts the bytes of each part that was copied.

    Raises:
        ConfigError: this repository is not writable.
    """
    arguments = [(repository, digest, copies, progress) for digest in dict.fromkeys(digests)]
    return run_in_threads(_repair_one, arguments, _OBJECTS_AT_ONCE)


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
            # Not a ConfigError: to the caller, that would mean that this repository is not writable.
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
