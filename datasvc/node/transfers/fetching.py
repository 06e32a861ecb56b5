"""Serves objects of a node's cache to peers; concurrent requests for one object share one fetch.

The routes of `/objects` use it. Objects are fetched only from the origin, never from a peer: two nodes that request
the same object from each other, because their lists of nodes differ, would wait for each other forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from datasvc.cache import Cache
from datasvc.errors import ConfigError, NotFoundError
from datasvc.node.transfers.sending import STALL_TIMEOUT_S, wait_for_progress
from datasvc.progress import Progress
from datasvc.repository import Digest, ObjectInfo, Repository


class _Fetch(Progress):
    """One fetch, and the requests that wait for its object or read it.

    Attributes:
        num_users: number of these requests.
        is_running: whether a thread has begun the fetch.
        progressed_at: time of the last progress of the fetch, in seconds on the clock of the event loop.
    """

    def __init__(self, fetches: Fetches) -> None:
        self._fetches, self._loop = fetches, asyncio.get_running_loop()
        self.num_users = 0
        self.is_running = False
        self.progressed_at = self._loop.time()
        self.future: Future[Path]  # result of the fetching thread
        self.completed: asyncio.Future[Path]  # the same result, for the event loop

    def advance(self, amount: int, **_: object) -> None:  # noqa: ARG002 - the time counts, not the bytes
        self.progressed_at = self._fetches.progressed_at = self._loop.time()


class Fetches:
    """The objects that requests of peers use now. Belongs to one event loop; calls of the cache run in threads.

    Args:
        cache: cache that was opened without peers.
        num_threads: maximum number of fetches at the same time.
        stall_timeout_s: a request fails when its fetch makes no progress for longer.

    Attributes:
        progressed_at: time of the last progress of any fetch, in seconds on the clock of the event loop.
    """

    def __init__(self, cache: Cache, *, num_threads: int = 16, stall_timeout_s: float = STALL_TIMEOUT_S) -> None:
        self._cache = cache
        self._stall_timeout_s = stall_timeout_s
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="datasvc-peer-fetch")
        # Separate threads, so that a request for a resident object does not wait for fetches.
        self._hold_threads = ThreadPoolExecutor(4, thread_name_prefix="datasvc-hold")
        self._in_progress: dict[ObjectInfo, _Fetch] = {}
        self._running: set[Future[Path]] = set()
        self.progressed_at = 0.0

    @property
    def num_in_progress(self) -> int:
        """Number of objects that requests are waiting for or reading."""
        return len(self._in_progress)

    @asynccontextmanager
    async def resident(self, digest: Digest) -> AsyncIterator[Path | None]:
        """Yield the object's file, protected from eviction while the block runs; None if it is not resident."""
        # A stack, because the hold begins in one thread and ends in another.
        hold = ExitStack()
        entering = self._hold_threads.submit(lambda: hold.enter_context(self._cache.resident(digest)))
        try:
            yield await asyncio.wrap_future(entering)
        finally:
            # A request may be cancelled while the thread acquires the object: release it when the thread is done.
            entering.add_done_callback(lambda _: self._hold_threads.submit(hold.close))

    @asynccontextmanager
    async def acquire(self, info: ObjectInfo, repository: Repository) -> AsyncIterator[Path]:
        """Yield the object's file, which is not evicted while the block runs.

        Args:
            info: object to fetch.
            repository: origin of the object, used unless the object is resident or being fetched already.

        Raises:
            CacheFullError, CorruptDataError, NotFoundError: see `Cache.acquire`.
            UnavailableError: see `Cache.acquire`; or the fetch makes no progress.
        """
        fetch = self._in_progress.get(info) or self._start(info, repository)
        fetch.num_users += 1
        try:
            yield await wait_for_progress(
                fetch.completed, idle_s=lambda: self._idle_s(fetch), stall_timeout_s=self._stall_timeout_s
            )
        finally:
            fetch.num_users -= 1
            if not fetch.num_users:
                del self._in_progress[info]
                fetch.future.cancel()  # has an effect only if the fetch has not started
                # The last user releases the object: after an earlier release, it might be evicted, and fetched again
                # for the next request.
                fetch.future.add_done_callback(lambda done: self._release(info.digest, done))

    def close(self, timeout_s: float) -> bool:
        """Release resident objects, and start no more fetches; return whether the running fetches ended in time."""
        self._hold_threads.shutdown()
        self._threads.shutdown(wait=False, cancel_futures=True)
        return not wait(list(self._running), timeout_s).not_done

    def _start(self, info: ObjectInfo, repository: Repository) -> _Fetch:
        """Start a fetch in a thread, and list it in `_in_progress`."""
        fetch = _Fetch(self)

        def run() -> Path:
            fetch.is_running = True
            fetch.advance(0)
            _check_size(info, repository)
            return self._cache.acquire(info, repository, fetch).path

        fetch.future = self._threads.submit(run)
        self._running.add(fetch.future)
        fetch.future.add_done_callback(self._running.discard)
        fetch.completed = asyncio.wrap_future(fetch.future)
        # Retrieve the exception: all waiting requests may be cancelled, and asyncio would log it as never retrieved.
        fetch.completed.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._in_progress[info] = fetch
        return fetch

    def _idle_s(self, fetch: _Fetch) -> float:
        # While a fetch waits for a thread, the progress of the other fetches counts as its own.
        progressed_at = fetch.progressed_at if fetch.is_running else max(fetch.progressed_at, self.progressed_at)
        return asyncio.get_running_loop().time() - progressed_at

    def _release(self, digest: Digest, done: Future[Path]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._cache.release(digest)


def _check_size(info: ObjectInfo, repository: Repository) -> None:
    """Compare a requested size with the origin's: for a wrong size, the cache would evict objects for nothing."""
    stored = repository.objects.size(info.digest)
    if stored is None:
        raise NotFoundError(f"{repository.objects.location(info.digest)} does not exist")
    if stored != info.size_bytes:
        raise ConfigError(
            f"{repository.objects.location(info.digest)} has {stored} bytes, but {info.size_bytes} were requested; "
            "read the size from the shard table"
        )
