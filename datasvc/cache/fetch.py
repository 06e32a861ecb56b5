"""Bring one object onto the node: reserve, fetch, verify, publish. Of many who want it at once, one fetches."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np

from datasvc.cache.catalogue import Catalogue, Record
from datasvc.cache.files import Files
from datasvc.errors import CacheFullError, CorruptDataError, UnavailableError
from datasvc.repository import Digest, ObjectInfo, Repository
from datasvc.repository.objects import digest_of

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
        while True:
            record = self._catalogue.reserve(info, self._lease_id, self._files)
            if record is None:
                self._files.wait_for_incoming(info.digest)
            elif record.state == "reserved":
                self._fetch(info, repository, report)
                return False
            elif self._is_trusted(info, record):
                return True

    def _is_trusted(self, info: ObjectInfo, record: Record) -> bool:
        """Check a resident object that another boot verified; a bad or missing one is dropped and counted."""
        path = self._files.object_path(info.digest)
        if record.boot == self._boot and path.exists():
            return True
        if _file_digest(path) == info.digest:
            self._catalogue.complete(info.digest, self._boot)
            return True
        path.unlink(missing_ok=True)
        self._catalogue.drop(info.digest, self._lease_id, corrupt=record.boot != self._boot)
        return False

    def _fetch(self, info: ObjectInfo, repository: Repository, report: Callable[[int], None] | None) -> None:
        try:
            self._fetch_verified(info, repository, report)
            self._files.publish(info.digest)
            self._catalogue.complete(info.digest, self._boot)
        except BaseException as error:
            self._catalogue.drop(info.digest, self._lease_id, corrupt=False)
            if isinstance(error, OSError):
                raise _translated(error, self._files.folder) from error
            raise
        finally:
            self._files.unlock(info.digest)

    def _fetch_verified(self, info: ObjectInfo, repository: Repository, report: Callable[[int], None] | None) -> None:
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


def _file_digest(path: Path) -> Digest | None:
    try:
        return digest_of(np.memmap(path, np.uint8, mode="r").data)
    except (OSError, ValueError):
        return None


def _translated(error: OSError, folder: Path) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CacheFullError(f"the disk of the cache {folder} is full before its budget is: lower the budget")
    return UnavailableError(f"cannot write to the cache {folder}: {error}")
