"""Finds out whether a stored object is damaged, by reading all of it."""

from __future__ import annotations

import io
from typing import Any

from datasvc.errors import ConfigError, CorruptDataError, DatasvcError, NotFoundError, UnavailableError
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository.objects.objects import Digest, Objects


class _NullFile(io.BytesIO):
    """A file that discards its content, so that `find_damage` needs no memory for the object."""

    def write(self, content: Any, /) -> int:
        return memoryview(content).nbytes


def find_damage(
    objects: Objects, digest: Digest, size_bytes: int | None = None, progress: Progress = NO_PROGRESS
) -> DatasvcError | None:
    """Read an object in bounded memory, and return what is wrong with it as an error; None if it is good.

    The verification and the repair of versions use this.

    Args:
        objects: objects of a repository.
        digest: digest of the object.
        size_bytes: size of the object according to a tensor table; None if unknown.
        progress: counts the bytes that were hashed, part by part.

    Returns:
        NotFoundError: the object is missing. CorruptDataError: its bytes do not match its digest, or its size is not
        `size_bytes`. UnavailableError: it cannot be read now. ConfigError: access is denied.
    """
    damage: DatasvcError | None = None
    for _ in range(count_reads(objects, digest)):
        try:
            stored_bytes = stored_size(objects, digest)
            objects.fetch(digest, stored_bytes, _NullFile(), progress=progress)
        except CorruptDataError as error:
            damage = error  # try again: a transfer may have damaged the bytes
        except (NotFoundError, UnavailableError, ConfigError) as error:
            return error
        else:
            if size_bytes in {None, stored_bytes}:
                return None
            location = objects.location(digest)
            return CorruptDataError(f"{location} has {stored_bytes} bytes; a table expects {size_bytes}")
    return damage


def stored_size(objects: Objects, digest: Digest) -> int:
    """Return the size in bytes of a stored object. Raise NotFoundError if it is missing."""
    size_bytes = objects.size(digest)
    if size_bytes is None:
        raise NotFoundError(f"object {objects.location(digest)} is missing")
    return size_bytes


def count_reads(objects: Objects, digest: Digest) -> int:
    """Return how many reads to try: a second transfer may be correct; a second local read gives the same bytes."""
    return 1 if objects.local_path(digest) is not None else 2
