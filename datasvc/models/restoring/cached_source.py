"""Reads stored bytes of checkpoints through the node's cache, which fetches and verifies each object once per node.

`StoredCopies` opens the source. The source acquires an object before its first read, and releases it after its last
planned read. An acquired object cannot be evicted. Objects for which the cache has no space are read directly from
the repository: a restore neither fails because the cache is too small, nor waits for other jobs to release objects.
"""

from __future__ import annotations

import mmap
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from datasvc.cache import Cache
from datasvc.errors import CacheFullError, ConfigError, CorruptDataError, NotFoundError, UnavailableError
from datasvc.models.restoring.failover_source import FailoverSource
from datasvc.models.tensors.tensor_table import ChainLink, TensorRecord
from datasvc.progress import SourceCounter
from datasvc.repository import Digest, ObjectInfo, Repository

DIRECT: Final = "direct"
"""Key in `came_bytes` for bytes that were read from a repository without the cache."""


class CachedSource:
    """A `ChunkSource` over a node's cache, its peers, and the repositories behind it. Call `close` at the end.

    Args:
        cache: cache of this node; its peers are tried before the repositories.
        repositories: repositories of the objects, nearest first.
        direct: source over the same repositories, for objects that the cache cannot provide.
        records: records of the tensors to read. The caller must read each chunk exactly once: the planned reads.
    """

    def __init__(
        self,
        cache: Cache,
        repositories: Sequence[Repository],
        direct: FailoverSource,
        records: Sequence[TensorRecord],
    ) -> None:
        self._cache = cache
        self._repositories = repositories
        self._direct = direct
        self._infos = {
            link.object: link.info for record in records for chunk in record.chunks for link in chunk.chain
        }
        self._remaining_bytes = count_bytes(records)  # of planned reads, by object
        self._lock = threading.Lock()
        # By acquired object: its mapped file; None if the cache cannot provide it.
        self._mapped: dict[Digest, Future[memoryview | None]] = {}
        # One lock per object: while the cache verifies the object for one reader, other readers of it wait.
        self._checking: dict[Digest, threading.Lock] = {}
        self._checked: set[Digest] = set()
        self._counter = SourceCounter()

    @property
    def came_bytes(self) -> Mapping[str, int]:
        """Number of stored bytes by place of origin, with the keys of `RestoreReport.came_bytes`."""
        return self._counter.bytes_by_source

    def location(self, digest: Digest) -> str:
        """See `ChunkSource`."""
        return self._direct.location(digest)

    def read_range(self, digest: Digest, offset: int, length: int) -> bytes | memoryview:
        """See `ChunkSource`: a view of the mapped file if the object is in the cache; copy from it at once."""
        view = self._view(digest)
        try:
            # A damaged file of the cache may be too short.
            if view is not None and offset + length <= len(view):
                return view[offset : offset + length]
            content = self._direct.read_range(digest, offset, length)
            self._counter.advance(length, source=DIRECT)
            return content
        finally:
            self._record_read(digest, length)

    def copies(self, digest: Digest, offset: int, length: int) -> Iterator[bytes | memoryview]:
        """See `ChunkSource`: first the cache's copy, verified or fetched again, then those of the repositories."""
        self._check_cached(digest)
        view = self._view(digest)
        try:
            if view is not None and offset + length <= len(view):
                yield view[offset : offset + length]
        finally:
            # This read is not planned, so it counts 0 bytes. The call releases the object if no planned read is left.
            self._record_read(digest, 0)
        yield from self._direct.copies(digest, offset, length)

    def close(self) -> None:
        """Release all objects that are still acquired."""
        with self._lock:
            remaining, self._mapped = self._mapped, {}
        for digest, future in remaining.items():
            self._release(digest, future)

    def _view(self, digest: Digest) -> memoryview | None:
        """Return the mapped object, and acquire it first if necessary; None if the cache cannot provide it."""
        with self._lock:
            future = self._mapped.get(digest)
            if future is None:
                # This call acquires the object, after it has released the lock. Other calls wait for the future.
                new_future = self._mapped[digest] = Future[memoryview | None]()
        if future is not None:
            return future.result()
        try:
            new_future.set_result(self._acquire(self._infos[digest]))
        except BaseException as error:
            new_future.set_exception(error)
            raise
        return new_future.result()

    def _acquire(self, info: ObjectInfo) -> memoryview | None:
        """Acquire and map an object; None if the cache is full or no repository provides the object."""
        for repository in self._repositories:
            try:
                acquired = self._cache.acquire(info, repository, self._counter)
            except CacheFullError:
                # The caller reads the object directly instead.
                return None
            except (CorruptDataError, NotFoundError, UnavailableError, ConfigError) as error:
                self._direct.bad.add(info.digest, repository.objects.location(info.digest), str(error))
                continue
            try:
                return _map(acquired.path)
            except BaseException:
                self._cache.release(info.digest)
                raise
        return None

    def _record_read(self, digest: Digest, length: int) -> None:
        """Count a read; release the object after its last planned read. Views of the object stay valid."""
        with self._lock:
            self._remaining_bytes[digest] -= length
            future = self._mapped.pop(digest, None) if self._remaining_bytes[digest] <= 0 else None
        if future is not None:
            self._release(digest, future)

    def _release(self, digest: Digest, future: Future[memoryview | None]) -> None:
        """Release an object in the cache, if `future` shows that it was acquired."""
        if future.exception() is None and future.result() is not None:
            self._cache.release(digest)

    def _check_cached(self, digest: Digest) -> None:
        """Have the cache verify its copy, once per object. If the copy is damaged, fetch the object again."""
        with self._lock:
            checking = self._checking.setdefault(digest, threading.Lock())
        with checking:
            if digest in self._checked:
                return
            self._checked.add(digest)
            # Keep a view, which stays valid after the cache removes the file. `bad.add` compares its bytes with those
            # of a good copy to find the affected tensors.
            checked_view = self._view(digest)
            # Release the object first: the cache requires this before it puts the object into quarantine.
            with self._lock:
                acquired = self._mapped.pop(digest, None)
            if acquired is not None:
                self._release(digest, acquired)
            if checked_view is not None and self._cache.check(digest) == "corrupt":
                where = f"the cache {self._cache.folder}"
                reason = f"object {digest} in {where} was changed; it is in quarantine there"
                self._direct.bad.add(digest, where, reason, content=checked_view, intact=self._view(digest))


def count_bytes(records: Iterable[TensorRecord]) -> Counter[Digest]:
    """Return the number of bytes that a restore of `records` reads of each object.

    Chunks of several tensors may share a range. `ChunkReader` reads such a range once, so it counts once.
    """
    counted = Counter[Digest]()
    ranges: set[ChainLink] = set()
    for record in records:
        for chunk in record.chunks:
            for link in chunk.chain:
                # `ChunkReader` shares only ranges: it reads a whole object again for each chunk.
                if link.is_whole_object or link not in ranges:
                    counted[link.object] += link.length
                    ranges.add(link)
    return counted


def _map(path: Path) -> memoryview:
    """Return a file of the cache as read-only memory. Raises UnavailableError: it cannot be mapped."""
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise UnavailableError(f"cannot map {path}: {error}") from error
