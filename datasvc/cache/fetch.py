"""Bring one object onto the node: reserve, fetch, verify, publish. Of many who want it at once, one fetches."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from datasvc.cache.catalogue import BUSY, RESIDENT, Catalogue
from datasvc.cache.files import Files
from datasvc.errors import CacheFullError, CorruptDataError, DatasvcError, UnavailableError
from datasvc.repository import Digest, ObjectInfo, Repository
from datasvc.repository.objects import digest_of_file

# A flipped bit on the way is gone at the second try; a bad origin is not.
_ATTEMPTS = 2


def boot_id() -> str:
    """Return what names this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class Fetcher:
    """Fetches objects of repositories into one cache.

    Args:
        catalogue: of the cache.
        files: of the cache.
        lease_id: of this process.
    """

    def __init__(self, catalogue: Catalogue, files: Files, lease_id: str) -> None:
        self._catalogue = catalogue
        self._files = files
        self._lease_id = lease_id
        self._boot = boot_id()

    def acquire(self, info: ObjectInfo, repository: Repository, report: Callable[[int], None] | None = None) -> bool:
        """Make an object resident and hold it.

        Args:
            info: the object.
            repository: its origin.
            report: called with the bytes of each part as it arrives.

        Returns:
            True when it was resident already (a hit), False when it was fetched.

        Raises:
            CacheFullError: no room in the budget, or the disk is full before the budget is.
            CorruptDataError: the origin's bytes are wrong, twice.
            NotFoundError, UnavailableError: see `Objects.fetch`.
        """
        try:
            return self._acquire(info, repository, report)
        except OSError as error:
            raise _translated(error, self._files.folder) from error
        finally:
            # Whatever happened, an interrupt at any line included: no reservation outlives this call.
            if self._files.is_locked_by_this_thread(info.digest):
                self._catalogue.drop(info.digest, self._lease_id)
                self._files.unlock(info.digest)

    def _acquire(self, info: ObjectInfo, repository: Repository, report: Callable[[int], None] | None) -> bool:
        while (answer := self._catalogue.reserve(info, self._lease_id, self._boot)) == BUSY:
            self._files.wait_for_incoming(info.digest)
        if answer == RESIDENT:
            return True
        if self._is_intact(info.digest):
            # From another boot, or from a process killed between publishing and saying so.
            self._catalogue.complete(info.digest, self._lease_id, self._boot, publish=False)
            return True
        self._fetch(info, repository, report)
        self._catalogue.complete(info.digest, self._lease_id, self._boot, publish=True)
        return False

    def _is_intact(self, digest: Digest) -> bool:
        """Check a file that lies there unverified; a bad one is counted."""
        path = self._files.object_path(digest)
        try:
            found = digest_of_file(path)
        except FileNotFoundError:
            return False
        if found != digest:
            # The file stays until the fetched one takes its name, or the reservation is dropped.
            self._catalogue.count_corrupt()
        return found == digest

    def _fetch(self, info: ObjectInfo, repository: Repository, report: Callable[[int], None] | None) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                file = self._files.incoming(info.digest)
                repository.objects.fetch(info.digest, info.size_bytes, file, report=report)
            except CorruptDataError:
                self._catalogue.count_corrupt()
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                return


def _translated(error: OSError, folder: Path) -> DatasvcError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CacheFullError(f"the disk of the cache {folder} is full before its budget is: lower the budget")
    return UnavailableError(f"cannot write to the cache {folder}: {error}")
