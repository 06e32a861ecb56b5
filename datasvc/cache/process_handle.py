"""The handle of a process on a cache folder: database, locks and lease are open once per process.

All `Cache` objects of a process on the same folder share one handle, which is closed with the last of them.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import count, islice
from pathlib import Path

from datasvc.cache.catalogue.files import Files
from datasvc.cache.catalogue.lease import Lease, name_order
from datasvc.cache.catalogue.object_locks import ObjectLocks
from datasvc.cache.catalogue.recovery import open_catalogue
from datasvc.cache.fetch.fetch import Fetcher, Outcome
from datasvc.cache.peers.peers import Peers
from datasvc.cache.sources.origin_source import RequestPool
from datasvc.cache.sources.remote_file import Store
from datasvc.errors import ConfigError, UnavailableError
from datasvc.order import NextUse
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, ObjectInfo

_ROWS_AT_ONCE = 1000


class CacheFolder:
    """A cache folder that is open in this process.

    Args:
        folder: folder of the cache.

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
            self._lease = Lease(self.files.leases)
            self.catalogue.register(self._lease.id, "")
            # All steps have succeeded: `close` is responsible from here on.
            opened.pop_all()
        self.requests = RequestPool()
        self._num_hits = 0
        self._order_numbers = count(1)
        self._lock = threading.Lock()
        self.process = os.getpid()
        self.num_users = 0

    def close(self) -> None:
        """Close database, locks and lease, and end the requests in progress."""
        self.requests.close()
        with suppress(UnavailableError):  # the last cache hits may stay uncounted
            self.count_hits()
        self._lease.close()
        self.catalogue.close()
        self.locks.close()
        self._open_lock.close()

    def close_locks(self) -> None:
        """Close the descriptors of locks in a forked child, which would keep them locked after the parent's exit."""
        self.locks.close()
        self.files.abandon()
        self._open_lock.close()
        self._lease.abandon()

    def fetcher(self, tenant: str, peers: Peers | None) -> Fetcher:
        """Return a fetcher that charges the quota of a tenant."""
        return Fetcher(self.catalogue, self.files, self._lease.id, tenant, self.requests, peers)

    def acquire(
        self, info: ObjectInfo, repository: Store, fetcher: Fetcher, progress: Progress = NO_PROGRESS
    ) -> Outcome:
        """Make an object resident, and add a hold on it until `release`.

        Raises the errors of `Fetcher.fetch`, and those of `check_process`.
        """
        self.check_process()
        # The hold comes first: from here on, no process can evict an object that the catalogue says is resident.
        self.locks.acquire(info.digest)
        try:
            if self.catalogue.is_ready(info):
                self._count_hit()  # in memory, until the next release: a hit writes nothing to the catalogue
                return "resident"
            return fetcher.fetch(info, repository, progress)
        except BaseException:
            self.locks.release(info.digest)
            raise

    def new_job(self, note: str = "") -> str:
        """Register one access order of this process, which has its own clock, and return its job id.

        Other processes can use the id too, such as the stager that fetches for the order. The job is valid until
        `end_job`, or until this process exits.

        Args:
            note: description of the job, shown in the status.
        """
        self.check_process()
        job_id = name_order(self._lease.id, next(self._order_numbers))
        self.catalogue.register(job_id, note)
        return job_id

    def end_job(self, job_id: str) -> None:
        """Mark a job as ended: its objects are evicted first. Ending it again does nothing."""
        self.check_process()
        self.catalogue.retire(job_id)

    def release(self, digest: Digest, reuse: NextUse | None = None, *, job_id: str | None = None) -> None:
        """Remove one hold of this process; see `Cache.release`. Raises ConfigError if it has none."""
        self.check_process()
        if not self.locks.count(digest):
            raise ConfigError(f"object {digest} cannot be released: it was not acquired, or was released already")
        try:
            # Before the hold is removed: an eviction right after it must see the next use.
            self.catalogue.release(digest, job_id or self._lease.id, reuse, self._take_hits())
        finally:
            self.locks.release(digest)

    def prefetch(
        self,
        info: ObjectInfo,
        repository: Store,
        fetcher: Fetcher,
        reuse: NextUse,
        *,
        evict: bool,
        job_id: str | None = None,
    ) -> Outcome:
        """Make an object resident before its use, without a hold. Raises the errors of `Fetcher.fetch`."""
        self.check_process()
        if self.catalogue.is_ready(info):
            return "resident"
        return fetcher.fetch(info, repository, prefetch=reuse, evict=evict, job_id=job_id)

    def expect(
        self, next_uses: Mapping[Digest, int], now: int, *, passed_only: bool, job_id: str | None = None
    ) -> None:
        """Declare the next uses of objects by this process; see `Cache.expect`."""
        self.check_process()
        remaining = iter(next_uses.items())
        # In chunks: a write transaction blocks the writes of all other processes.
        while chunk := dict(islice(remaining, _ROWS_AT_ONCE)):
            self.catalogue.expect(chunk, job_id or self._lease.id, now, passed_only=passed_only)

    @contextmanager
    def resident(self, digest: Digest) -> Iterator[Path | None]:
        """Yield the file of a resident, verified object, with a hold inside the block; None if it is not resident."""
        self.check_process()
        self.locks.acquire(digest)
        try:
            record = self.catalogue.record(digest)
            info = None if record is None else ObjectInfo(digest, record.size_bytes)
            yield self.files.object_path(digest) if info is not None and self.catalogue.is_ready(info) else None
        finally:
            self.locks.release(digest)

    def check_process(self) -> None:
        """Raise ConfigError in a forked child: LMDB does not support a fork with an open database."""
        if self.process != os.getpid():
            raise ConfigError(
                "this cache was opened before a fork, and its database cannot be used in the child process; start "
                "processes with the method 'spawn' instead of 'fork'"
            )

    def count_hits(self) -> None:
        """Add the cache hits since the last release to the counters; otherwise the next release adds them."""
        hits = self._take_hits()
        if hits:
            self.catalogue.count(hits)

    def _count_hit(self) -> None:
        with self._lock:
            self._num_hits += 1

    def _take_hits(self) -> dict[str, int]:
        with self._lock:
            taken, self._num_hits = self._num_hits, 0
        return {"hits": taken} if taken else {}


# The open folders of this process. Uses that end in a finalizer wait in `_leaving` while the lock is taken.
_folders: dict[Path, CacheFolder] = {}
_folders_lock = threading.Lock()
_leaving: deque[tuple[Path, CacheFolder]] = deque()


def join_folder(folder: Path) -> CacheFolder:
    """Return the open folder of this process; it is closed when each `join_folder` had its `leave_folder`."""
    try:
        with _folders_lock:
            if folder not in _folders:
                _folders[folder] = CacheFolder(folder)
            opened = _folders[folder]
            opened.check_process()
            opened.num_users += 1
    finally:
        _close_unused_folders()
    return opened


def leave_folder(folder: Path, opened: CacheFolder) -> None:
    """End one use of a folder in this process. Never blocks: a finalizer may interrupt any call of its thread."""
    _leaving.append((folder, opened))
    _close_unused_folders()


def _close_unused_folders() -> None:
    # The thread that has the lock, perhaps this one, repeats the check after it has released the lock.
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
    """Close the inherited descriptors of locks in a forked child: the locks stand for the parent process."""
    global _folders_lock  # noqa: PLW0603  a thread that does not exist in the child may have locked it
    _folders_lock = threading.Lock()
    for opened in _folders.values():
        opened.close_locks()


os.register_at_fork(after_in_child=_forget_folders)
