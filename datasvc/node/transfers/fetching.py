"""Objects that peers ask for and that are not here yet: fetched from the origin once, however many ask.

Only from the origin, never from a peer: whoever asks takes this node for the owner, and two nodes that take each
other for it must not wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from pathlib import Path

from datasvc.cache import Cache
from datasvc.errors import ConfigError, NotFoundError
from datasvc.node.transfers.waiting import PATIENCE_S, wait_moving
from datasvc.repository import Digest, ObjectInfo, Repository


class _Fetch:
    """One object on its way, and how many requests wait for it or read it."""

    def __init__(self, now: float) -> None:
        self.num_users = 0
        self.is_running = False
        self.moved_at = now
        self.future: Future[Path]
        self.arrived: asyncio.Future[Path]


class Fetches:
    """The objects under way for peers. Belongs to one event loop; the cache's calls run in threads.

    Args:
        cache: opened without peers.
        num_threads: objects that are fetched side by side.
        patience_s: a fetch that stands still for longer is not waited for.
    """

    def __init__(self, cache: Cache, *, num_threads: int = 16, patience_s: float = PATIENCE_S) -> None:
        self._cache = cache
        self._patience_s = patience_s
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="datasvc-peer-fetch")
        self._under_way: dict[ObjectInfo, _Fetch] = {}
        self._running: set[Future[Path]] = set()
        self._moved_at = 0.0

    @property
    def num_under_way(self) -> int:
        """Objects that are fetched or waited for now."""
        return len(self._under_way)

    @asynccontextmanager
    async def holding(self, info: ObjectInfo, repository: Repository) -> AsyncIterator[Path]:
        """Yield the object's file, which stays while the block runs.

        Args:
            info: the object.
            repository: where it is read from if it is not here and nobody reads it already.

        Raises:
            CacheFullError, CorruptDataError, NotFoundError, UnavailableError: as `Cache.acquire`.
            UnavailableError: it does not move.
        """
        fetch = self._under_way.get(info) or self._start(info, repository)
        fetch.num_users += 1
        try:
            yield await wait_moving(fetch.arrived, idle_s=lambda: self._idle_s(fetch), patience_s=self._patience_s)
        finally:
            fetch.num_users -= 1
            if not fetch.num_users:
                del self._under_way[info]
                fetch.future.cancel()  # what nobody waits for any more need not begin
                # Held until the last one has read it: without that it might be evicted and fetched twice.
                fetch.future.add_done_callback(lambda done: self._release(info.digest, done))

    def close(self, timeout_s: float) -> bool:
        """Start nothing more; returns whether what was under way ended in time."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        return not wait(list(self._running), timeout_s).not_done

    def _start(self, info: ObjectInfo, repository: Repository) -> _Fetch:
        loop = asyncio.get_running_loop()
        fetch = _Fetch(loop.time())

        def moved(*_: object) -> None:
            fetch.moved_at = self._moved_at = loop.time()

        def run() -> Path:
            fetch.is_running = True
            moved()
            _check_size(info, repository)
            return self._cache.acquire(info, repository, moved).path

        fetch.future = self._threads.submit(run)
        self._running.add(fetch.future)
        fetch.future.add_done_callback(self._running.discard)
        fetch.arrived = asyncio.wrap_future(fetch.future)
        # All who wait may be gone when it fails.
        fetch.arrived.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._under_way[info] = fetch
        return fetch

    def _idle_s(self, fetch: _Fetch) -> float:
        # One that waits for a thread moves when the others do.
        moved_at = fetch.moved_at if fetch.is_running else max(fetch.moved_at, self._moved_at)
        return asyncio.get_running_loop().time() - moved_at

    def _release(self, digest: Digest, done: Future[Path]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._cache.release(digest)


def _check_size(info: ObjectInfo, repository: Repository) -> None:
    """Believe no caller: room is made for an object, and others are evicted, by the size that its origin says."""
    stored = repository.objects.size(info.digest)
    if stored is None:
        raise NotFoundError(f"{repository.objects.location(info.digest)} does not exist")
    if stored != info.size_bytes:
        raise ConfigError(
            f"{repository.objects.location(info.digest)} has {stored} bytes, not the {info.size_bytes} asked for"
        )
