"""What all caches of one process on one folder share: database, locks and lease are open once in a process."""

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
from datasvc.cache.catalogue.object_locks import Holds
from datasvc.cache.catalogue.recovery import open_catalogue
from datasvc.cache.fetch.fetch import Fetcher, Outcome, Report
from datasvc.cache.peers.peers import Peers
from datasvc.cache.sources.origin_source import RequestPool
from datasvc.cache.sources.remote_file import Store
from datasvc.errors import ConfigError, UnavailableError
from datasvc.order import NextUse
from datasvc.repository import Digest, ObjectInfo

_ROWS_AT_ONCE = 1000


class CacheFolder:
    """A cache folder, open in this process.

    Args:
        folder: the folder.

    Raises:
        ConfigError, CorruptDataError, UnavailableError: see `Cache`.
    """

    def __init__(self, folder: Path) -> None:
        self.files = Files(folder)
        self.holds = Holds(folder / "holds")
        with ExitStack() as opened:
            opened.callback(self.holds.close)
            self.catalogue, self._presence = open_catalogue(self.files, self.holds)
            opened.callback(self._presence.close)
            opened.callback(self.catalogue.close)
            self._lease = Lease(self.files.leases)
            self.catalogue.enter(self._lease.id, "")
            opened.pop_all()
        self.requests = RequestPool()
        self._num_hits = 0
        self._order_numbers = count(1)
        self._lock = threading.Lock()
        self.process = os.getpid()
        self.num_users = 0

    def close(self) -> None:
        """Let go of everything."""
        self.requests.close()
        with suppress(UnavailableError):  # of the counters' last few
            self.count_hits()
        self._lease.close()
        self.catalogue.close()
        self.holds.close()
        self._presence.close()

    def close_locks(self) -> None:
        """Close the descriptors of locks: in a child, which would keep them locked after the parent's end."""
        self.holds.close()
        self.files.abandon()
        self._presence.close()
        self._lease.abandon()

    def fetcher(self, tenant: str, peers: Peers | None) -> Fetcher:
        """Return who fetches for a tenant."""
        return Fetcher(self.catalogue, self.files, self._lease.id, tenant, self.requests, peers)

    def acquire(self, info: ObjectInfo, repository: Store, fetcher: Fetcher, report: Report | None = None) -> Outcome:
        """Make an object resident and hold it until `release`; raises as `Fetcher.fetch`, and ConfigError."""
        self.check_process()
        # Held before it is looked at: from here on nobody evicts it.
        self.holds.acquire(info.digest)
        try:
            if self.catalogue.ready(info):
                self._count_hit()
                return "resident"
            return fetcher.fetch(info, repository, report)
        except BaseException:
            self.holds.release(info.digest)
            raise

    def new_owner(self, note: str = "") -> str:
        """Return a name for one order of this process, which has a clock of its own.

        It names the order in other processes too, such as one that fetches ahead for it. It counts as gone from
        `end_owner` on, or from the end of this process.

        Args:
            note: what it calls itself.
        """
        self.check_process()
        owner = name_order(self._lease.id, next(self._order_numbers))
        self.catalogue.enter(owner, note)
        return owner

    def end_owner(self, owner: str) -> None:
        """Say that an order is done: what it leaves goes first. Ending it again does nothing."""
        self.check_process()
        self.catalogue.end(owner)

    def release(self, digest: Digest, reuse: NextUse | None = None, *, owner: str | None = None) -> None:
        """Give up one hold of this process; see `Cache.release`. Raises ConfigError: it has none."""
        self.check_process()
        if not self.holds.count(digest):
            raise ConfigError(f"object {digest} was not acquired, or was released already")
        try:
            # Before the hold goes: whoever evicts next must know when it is needed.
            self.catalogue.release(digest, owner or self._lease.id, reuse, self._take_hits())
        finally:
            self.holds.release(digest)

    def prefetch(
        self,
        info: ObjectInfo,
        repository: Store,
        fetcher: Fetcher,
        reuse: NextUse,
        *,
        evict: bool,
        owner: str | None = None,
    ) -> Outcome:
        """Make an object resident ahead of its use, without holding it; raises as `Fetcher.fetch`."""
        self.check_process()
        if self.catalogue.ready(info):
            return "resident"
        return fetcher.fetch(info, repository, prefetch=reuse, evict=evict, owner=owner)

    def expect(
        self, next_uses: Mapping[Digest, int], now: int, *, passed_only: bool, owner: str | None = None
    ) -> None:
        """Say when this process needs what is resident already; see `Cache.expect`."""
        self.check_process()
        waiting = iter(next_uses.items())
        # A piece at a time: nobody else can write to the catalogue meanwhile.
        while some := dict(islice(waiting, _ROWS_AT_ONCE)):
            self.catalogue.expect(some, owner or self._lease.id, now, passed_only=passed_only)

    @contextmanager
    def resident(self, digest: Digest) -> Iterator[Path | None]:
        """Yield the file of an object that is resident and verified, held inside the block; None where it is not."""
        self.check_process()
        self.holds.acquire(digest)
        try:
            record = self.catalogue.record(digest)
            info = None if record is None else ObjectInfo(digest, record.size_bytes)
            yield self.files.object_path(digest) if info is not None and self.catalogue.ready(info) else None
        finally:
            self.holds.release(digest)

    def check_process(self) -> None:
        """Raise ConfigError in a forked child: no database survives a fork."""
        if self.process != os.getpid():
            raise ConfigError(
                "this cache was opened before a fork, which no database survives; spawn processes instead"
            )

    def count_hits(self) -> None:
        """Add to the counters what was found resident; otherwise the next release does."""
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


_folders: dict[Path, CacheFolder] = {}
_folders_lock = threading.Lock()
_leaving: deque[tuple[Path, CacheFolder]] = deque()


def join_folder(folder: Path) -> CacheFolder:
    """Return the open folder, which stays open until each `join_folder` was answered by `leave_folder`."""
    try:
        with _folders_lock:
            if folder not in _folders:
                _folders[folder] = CacheFolder(folder)
            opened = _folders[folder]
            opened.check_process()
            opened.num_users += 1
    finally:
        _close_what_nobody_uses()
    return opened


def leave_folder(folder: Path, opened: CacheFolder) -> None:
    """Say that one user of the folder in this process is gone: also from a finalizer, in the middle of any call."""
    _leaving.append((folder, opened))
    _close_what_nobody_uses()


def _close_what_nobody_uses() -> None:
    # Whoever has the lock, this thread perhaps, looks once more when it has freed it.
    while _leaving and _folders_lock.acquire(blocking=False):
        try:
            while _leaving:
                _leave(*_leaving.popleft())
        finally:
            _folders_lock.release()


def _leave(folder: Path, opened: CacheFolder) -> None:
    if opened.process != os.getpid():
        return  # a copy in a forked child: lease and database belong to the parent
    opened.num_users -= 1
    if not opened.num_users:
        del _folders[folder]
        opened.close()


def _forget_folders() -> None:
    """In a forked child: close its copies of the descriptors whose locks say that the parent lives and holds."""
    global _folders_lock  # noqa: PLW0603  another thread may have had it, which is not in this process
    _folders_lock = threading.Lock()
    for opened in _folders.values():
        opened.close_locks()


os.register_at_fork(after_in_child=_forget_folders)
