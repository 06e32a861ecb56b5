"""The handle of a process on a cache folder: database, locks and lease are open once per process.

All `Cache` and `CacheJob` objects of a process on the same folder share one `CacheFolder`, which is closed with the
last of them.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path

from datasvc.cache.catalogue.files import DISK_FULL, Files
from datasvc.cache.catalogue.object_locks import Lease, ObjectLocks, name_order
from datasvc.cache.catalogue.recovery import open_catalogue
from datasvc.cache.fetch.fetch import Fetcher
from datasvc.cache.sources.origin_source import RequestPool
from datasvc.errors import ConfigError, UnavailableError
from datasvc.repository.store.retries import map_exceptions


class CacheFolder:
    """A cache folder that is open in this process, shared by all jobs of the process on this folder.

    Attributes:
        lease_id: id of this process's lease, which is also the id of its job.
        process: id of the process that opened the folder.
        num_users: number of `join_folder` calls minus the number of `leave_folder` calls.

    Raises:
        ConfigError, CorruptDataError, UnavailableError: see `Cache`.
    """

    def __init__(self, folder: Path) -> None:
        self.files = Files(folder)
        self.locks = ObjectLocks(folder / "holds")
        with ExitStack() as opened:
            opened.callback(self.locks.close)
            self.catalogue, self._open_lock = open_catalogue(self.files, self.locks)
            opened.callback(self._open_lock.close)
            opened.callback(self.catalogue.close)
            self._lease = self._new_lease()
            self.lease_id = self._lease.id
            self.catalogue.register(self.lease_id, "")
            # All steps have succeeded: keep the parts open after this block. From here on, `close` closes them.
            opened.pop_all()
        self._requests = RequestPool()
        self.fetcher = Fetcher(self.catalogue, self.files, self._requests)
        self._num_hits = 0
        self._order_numbers = count(1)
        self._lock = threading.Lock()
        self.process = os.getpid()
        self.num_users = 0

    def _new_lease(self) -> Lease:
        """Create the lease. If the disk has no inode for its file, evict an object first."""
        try:
            return Lease(self.files.leases)
        except ConfigError as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in DISK_FULL):
                raise
        self.catalogue.free_inode()
        return Lease(self.files.leases)

    def close(self) -> None:
        """Close database, locks and lease, and end the requests in progress."""
        self._requests.close()
        with suppress(UnavailableError):  # the last cache hits may stay uncounted
            self.count_hits()
        self._lease.close()
        self.catalogue.close()
        self.locks.close()
        self._open_lock.close()

    def close_locks(self) -> None:
        """Close the inherited descriptors in a forked child: they would keep the locks after the parent's exit."""
        self.locks.close_after_fork()
        self.catalogue.close_after_fork()
        self.files.abandon()
        self._open_lock.close()
        self._lease.abandon()

    def new_job_id(self, note: str) -> str:
        """Register one access order of this process; return its id, which is valid until this process exits."""
        job_id = name_order(self.lease_id, next(self._order_numbers))
        self.catalogue.register(job_id, note)
        return job_id

    def check_process(self) -> None:
        """Raise ConfigError in a forked child: LMDB does not support a fork with an open database."""
        if self.process != os.getpid():
            raise ConfigError(
                "this cache was opened before a fork, and its database cannot be used in the child process; start "
                "processes with the method 'spawn' instead of 'fork'"
            )

    def count_hits(self) -> None:
        """Add the cache hits that are only in memory to the catalogue's counters now, not at the next release."""
        hits = self.take_hits()
        if hits:
            self.catalogue.count(hits)

    def count_hit(self) -> None:
        """Count a cache hit in memory."""
        with self._lock:
            self._num_hits += 1

    def take_hits(self) -> dict[str, int]:
        """Return the hits since the last call, as counters to add to the catalogue."""
        with self._lock:
            taken, self._num_hits = self._num_hits, 0
        return {"hits": taken} if taken else {}


# The open folders of this process. `leave_folder` must not block, so it only adds its arguments to `_leaving`; a
# thread that has `_folders_lock` ends these uses.
_folders: dict[Path, CacheFolder] = {}
_folders_lock = threading.Lock()
_leaving: deque[tuple[Path, CacheFolder]] = deque()


def join_folder(folder: Path) -> CacheFolder:
    """Return the process's handle on a folder, opened if needed. For each call, call `leave_folder` once."""
    try:
        with _folders_lock:
            if folder not in _folders:
                with map_exceptions("open", f"the cache {folder}"):
                    _folders[folder] = CacheFolder(folder)
            opened = _folders[folder]
            opened.check_process()
            opened.num_users += 1
    finally:
        _close_unused_folders()
    return opened


def leave_folder(folder: Path, opened: CacheFolder) -> None:
    """End one use of a folder; close it after the last. Never blocks: a finalizer may interrupt any other call."""
    _leaving.append((folder, opened))
    _close_unused_folders()


def _close_unused_folders() -> None:
    # If the lock is taken, its owner (perhaps this thread) repeats this check after it has released the lock.
    while _leaving and _folders_lock.acquire(blocking=False):
        try:
            while _leaving:
                _leave(*_leaving.popleft())
        finally:
            _folders_lock.release()


def _leave(folder: Path, opened: CacheFolder) -> None:
    if opened.process != os.getpid():
        return  # in a forked child: lease and database belong to the parent
    opened.num_users -= 1
    if not opened.num_users:
        del _folders[folder]
        opened.close()


def _forget_folders() -> None:
    """Close the inherited descriptors in a forked child, because the locks belong to the parent process."""
    global _folders_lock  # noqa: PLW0603  a thread that does not exist in the child may have locked it
    _folders_lock = threading.Lock()
    # The folders stay in `_folders`, so that `join_folder` refuses to open them again in the child.
    for opened in _folders.values():
        opened.close_locks()


os.register_at_fork(after_in_child=_forget_folders)
