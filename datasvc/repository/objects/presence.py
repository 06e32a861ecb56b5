"""Checks that objects exist, before a commit references them, and that their bytes match their digests.

A writer has stored or found each object earlier. Since then, a `gc` with `--no-writers` or with a wrong clock may
have deleted an object. Or another rank may have stored its objects in another repository by mistake. A version with a
missing object could never be restored, although its writer reported success.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

from datasvc.errors import ConfigError, CorruptDataError, DatasvcError, NotFoundError, UnavailableError
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository.objects.objects import Digest, Objects
from datasvc.threads import map_in_threads

_MAX_PARALLEL_REQUESTS: Final = 16
_MAX_CHECKS_PER_FOLDER: Final = 32
_NAMES_PER_REQUEST: Final = 1000  # maximum of a request; listing a larger folder takes several


def check_present(objects: Objects, referenced: Iterable[Digest], what: str) -> None:
    """Check that all objects that a commit is about to reference exist; `what` is the new entry, for messages.

    Raises:
        NotFoundError: an object is missing; the caller must not commit.
        UnavailableError: the store does not respond.
    """
    # An attached object is not stored: `size` finds its recipe.
    missing = {digest for digest in find_missing(objects, referenced) if objects.size(digest) is None}
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise NotFoundError(
            f"{what} is not committed: it references object {objects.location(min(missing))}{more}, which no longer "
            "exists, although this process or another rank has stored or found it. Check that no gc runs with "
            "--no-writers and that nothing else deletes files, then save again; `verify` finds other versions with "
            "missing objects"
        )


def find_missing(objects: Objects, referenced: Iterable[Digest]) -> set[Digest]:
    """Return the digests of objects that are not stored.

    On a remote store, each object takes one request. A folder with more than `_MAX_CHECKS_PER_FOLDER` referenced
    objects is listed instead, if the listing takes fewer requests than it has referenced objects. The listing of one
    folder predicts the size of all, because digests are spread evenly over 256 folders. Raises UnavailableError.
    """
    if objects.is_near:
        # The check of a local file takes less time than passing it to a thread.
        return {digest for digest in referenced if objects.storage.size(objects.path(digest)) is None}
    folders: dict[str, set[Digest]] = defaultdict(set)
    for digest in referenced:
        folders[objects.path(digest).rpartition("/")[0]].add(digest)

    def list_missing(folder: str) -> tuple[set[Digest], int]:
        """Return the missing objects of a folder, and the number of requests that its listing takes."""
        names = objects.storage.list(folder)
        return folders[folder].difference(map(Digest, names)), len(names) // _NAMES_PER_REQUEST + 1

    missing: set[Digest] = set()
    to_list: list[str] = []
    fullest = max(folders, key=lambda folder: len(folders[folder]), default="")
    # List the fullest folder only if it has many referenced objects: in a large store, a listing takes some hundred
    # requests, one after the other.
    if len(folders[fullest]) > _MAX_CHECKS_PER_FOLDER:
        missing, num_requests = list_missing(fullest)
        del folders[fullest]
        max_checks = max(_MAX_CHECKS_PER_FOLDER, num_requests)  # with more checks, a listing takes fewer requests
        to_list = [folder for folder, digests in folders.items() if len(digests) > max_checks]
    to_check = [digest for folder in folders.keys() - set(to_list) for digest in folders[folder]]
    for missing_in_folder, _ in map_in_threads(list_missing, to_list, _MAX_PARALLEL_REQUESTS):
        missing |= missing_in_folder
    paths = map(objects.path, to_check)
    sizes = map_in_threads(objects.storage.size, list(paths), _MAX_PARALLEL_REQUESTS)
    return missing.union(digest for digest, size in zip(to_check, sizes, strict=True) if size is None)


class _NullFile(io.BytesIO):
    """A file that discards its content, so that `find_damage` needs no memory for the object."""

    def write(self, content: Any, /) -> int:
        return memoryview(content).nbytes


def find_damage(
    objects: Objects, digest: Digest, size_bytes: int | None = None, progress: Progress = NO_PROGRESS
) -> DatasvcError | None:
    """Read an object in bounded memory, and return what is wrong with it as an error; None if it is good.

    `size_bytes` is its size according to a tensor table; None if unknown.

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
