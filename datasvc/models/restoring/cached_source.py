"""Stored bytes of checkpoints through a node's cache: fetched once per node, verified on arrival, mapped.

An object is brought into the cache when its first piece is wanted, held by a lease while pieces of it are to come,
and let go after the last one. What finds no room is read from the repository directly, so that a restore never fails
for the size of a cache, nor waits for what others hold.
"""

from __future__ import annotations

import mmap
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self

from datasvc.cache import Cache
from datasvc.cache.fetch.fetch import Outcome
from datasvc.errors import CacheFullError, ConfigError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.models.restoring.copies import DIRECT, count_bytes, links_of
from datasvc.models.restoring.failover_source import FailoverSource
from datasvc.models.tensors.tensor_table import TensorRecord
from datasvc.repository import Digest, ObjectInfo, Repository


class CachedObjects:
    """An `ObjectSource` over a node's cache, its peers, and the repositories behind it. Use it as a context manager.

    Args:
        cache: of this node; its peers are asked before the repositories.
        repositories: that hold the objects, the nearest first.
        behind: the same places, for what the cache cannot give.
        records: of the tensors that will be read, each piece once: they say when an object may go.
    """

    def __init__(
        self,
        cache: Cache,
        repositories: Sequence[Repository],
        behind: FailoverSource,
        records: Iterable[TensorRecord],
    ) -> None:
        self._cache = cache
        self._repositories = repositories
        self._behind = behind
        links = links_of(records)
        self._infos = {link.object: ObjectInfo(link.object, link.object_bytes) for link in links}
        self._left_bytes = count_bytes(links)
        self._lock = threading.Lock()
        self._mapped: dict[Digest, Future[memoryview | None]] = {}
        self._checking: dict[Digest, threading.Lock] = {}
        self._checked: set[Digest] = set()
        self._came: Counter[str] = Counter()

    @property
    def came_bytes(self) -> Mapping[str, int]:
        """How many stored bytes came from where: "resident", "peer", "origin", and "direct" past the cache."""
        with self._lock:
            return dict(self._came)

    def location(self, digest: Digest) -> str:
        """See `ObjectSource`."""
        return self._behind.location(digest)

    def read_range(self, digest: Digest, offset: int, length: int) -> bytes | memoryview:
        """See `ObjectSource`: a view of the mapped file where it is in the cache, to be copied from at once."""
        view = self._view(digest)
        try:
            if view is not None and offset + length <= len(view):
                return view[offset : offset + length]
            content = self._behind.read_range(digest, offset, length)
            self._count(DIRECT, length)
            return content
        finally:
            self._used(digest, length)

    def copies(self, digest: Digest, offset: int, length: int) -> Iterator[bytes | memoryview]:
        """See `ObjectSource`: the cache's own, once it was hashed again or fetched anew, then the repositories'."""
        self._check_cached(digest)
        view = self._view(digest)
        try:
            if view is not None and offset + length <= len(view):
                yield view[offset : offset + length]
        finally:
            self._used(digest, 0)
        yield from self._behind.copies(digest, offset, length)

    def close(self) -> None:
        """Let go of everything that is still held."""
        with self._lock:
            left, self._mapped = self._mapped, {}
        for digest, future in left.items():
            self._let_go(digest, future)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _view(self, digest: Digest) -> memoryview | None:
        """Return the mapped object, brought by whoever asks first; None where the cache cannot have it."""
        with self._lock:
            future = self._mapped.get(digest)
            if future is None:
                mine = self._mapped[digest] = Future[memoryview | None]()
        if future is not None:
            return future.result()
        try:
            mine.set_result(self._bring(self._infos[digest]))
        except BaseException as error:
            mine.set_exception(error)
            raise
        return mine.result()

    def _bring(self, info: ObjectInfo) -> memoryview | None:
        for repository in self._repositories:
            try:
                acquired = self._cache.acquire(info, repository, self._report)
            except CacheFullError:
                return None
            except (CorruptDataError, NotFoundError, UnavailableError, ConfigError) as error:
                self._behind.bad.add(info.digest, repository.objects.location(info.digest), str(error))
                continue
            if acquired.outcome == "resident":
                self._count("resident", info.size_bytes)
            try:
                return _map(acquired.path)
            except BaseException:
                self._cache.release(info.digest)
                raise
        return None

    def _used(self, digest: Digest, length: int) -> None:
        """Let go of an object once all that was planned of it is read; its mapping lives as long as its views."""
        with self._lock:
            self._left_bytes[digest] -= length
            future = self._mapped.pop(digest, None) if self._left_bytes[digest] <= 0 else None
        if future is not None:
            self._let_go(digest, future)

    def _let_go(self, digest: Digest, future: Future[memoryview | None]) -> None:
        if future.exception() is None and future.result() is not None:
            self._cache.release(digest)

    def _check_cached(self, digest: Digest) -> None:
        """Have the cache read its copy again, once; a bad one goes into quarantine there, and is fetched anew."""
        with self._lock:
            checking = self._checking.setdefault(digest, threading.Lock())
        with checking:
            if digest in self._checked:
                return
            self._checked.add(digest)
            before = self._view(digest)
            with self._lock:
                held = self._mapped.pop(digest, None)
            if held is not None:
                self._let_go(digest, held)
            if before is not None and self._cache.check(digest) == "corrupt":
                where = f"the cache {self._cache.folder}"
                reason = f"object {digest} in {where} was changed; it is in quarantine there"
                self._behind.bad.add(digest, where, reason, content=before, intact=self._view(digest))

    def _report(self, outcome: Outcome, num_bytes: int) -> None:
        self._count(outcome, num_bytes)

    def _count(self, where: str, num_bytes: int) -> None:
        with self._lock:
            self._came[where] += num_bytes


def _map(path: Path) -> memoryview:
    """Return a file of the cache as read-only memory. Raises UnavailableError."""
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise UnavailableError(f"cannot map {path}: {error}") from error
