"""Where a cache keeps its files, and the lock of an object that is on its way.

CACHE/objects/3f/3fa9...    resident objects, named by digest
CACHE/incoming/3fa9...      an object on its way, locked by whoever fetches it
CACHE/leases/               one locked file per process, see `lease`
CACHE/catalogue/            LMDB, see `catalogue`
"""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from datasvc.cache.lease import is_locked
from datasvc.errors import ConfigError
from datasvc.repository import Digest
from datasvc.repository.objects import parse_digest


class Files:
    """The files of one cache folder, made where missing.

    Args:
        folder: the cache's folder.

    Raises:
        ConfigError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.leases = folder / "leases"
        self.catalogue = folder / "catalogue"
        self._locked: dict[tuple[Digest, int], BinaryIO] = {}  # by object and thread
        try:
            for needed in (self.leases, self.catalogue, folder / "objects", folder / "incoming"):
                needed.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot use {folder} as a cache: {error}") from error

    def object_path(self, digest: Digest) -> Path:
        """Return where a resident object lies."""
        return self.folder / "objects" / digest[:2] / parse_digest(digest)

    def incoming_path(self, digest: Digest) -> Path:
        """Return where an object grows while it is fetched."""
        return self.folder / "incoming" / parse_digest(digest)

    def lock_incoming(self, digest: Digest) -> None:
        """Start a new incoming file, locked until `unlock`; one that a dead process left is replaced.

        Call it in a write transaction of the catalogue only, so that there is never more than one. Raises OSError.
        """
        path = self.incoming_path(digest)
        path.unlink(missing_ok=True)
        file = path.open("xb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except BaseException:
            file.close()
            raise
        self._locked[digest, threading.get_ident()] = file

    def is_incoming_locked(self, digest: Digest) -> bool:
        """Return whether a living process or thread fetches the object."""
        return is_locked(self.incoming_path(digest))

    def wait_for_incoming(self, digest: Digest) -> None:
        """Return once whoever fetches the object has finished, failed or died: the kernel frees its lock then."""
        try:
            descriptor = os.open(self.incoming_path(digest), os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)

    def is_locked_by_this_thread(self, digest: Digest) -> bool:
        """Return whether the calling thread has the lock."""
        return (digest, threading.get_ident()) in self._locked

    def incoming(self, digest: Digest) -> BinaryIO:
        """Return the locked file that this thread fetches into, emptied."""
        file = self._locked[digest, threading.get_ident()]
        file.seek(0)
        file.truncate()
        return file

    def publish(self, digest: Digest) -> None:
        """Give a complete, verified incoming file its name; the lock stays until `unlock`. Raises OSError."""
        file = self._locked[digest, threading.get_ident()]
        file.flush()
        target = self.object_path(digest)
        target.parent.mkdir(exist_ok=True)
        # No fsync: after a crash of the machine the object is verified again before it is used.
        self.incoming_path(digest).rename(target)

    def unlock(self, digest: Digest) -> None:
        """Free this thread's lock, and with it whoever waits for the object; what was not published is removed."""
        file = self._locked.pop((digest, threading.get_ident()))
        with suppress(OSError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(self.incoming_path(digest))):
                self.incoming_path(digest).unlink()
        with suppress(OSError):  # a full disk: what was not written is not wanted either
            file.close()
