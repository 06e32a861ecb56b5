"""Use resident objects from an event loop: acquired and released in threads, also if a request is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from datasvc.cache import Cache
from datasvc.repository import Digest


class Residency:
    """The resident objects of one cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="datasvc-hold")

    @asynccontextmanager
    async def resident(self, digest: Digest) -> AsyncIterator[Path | None]:
        """Yield the object's file, protected from eviction while the block runs; None if it is not resident."""
        acquired = ExitStack()
        entering = self._threads.submit(lambda: acquired.enter_context(self._cache.resident(digest)))
        try:
            yield await asyncio.wrap_future(entering)
        finally:
            # A request may be cancelled while the thread acquires the object: release it when that is done.
            entering.add_done_callback(lambda _: self._threads.submit(acquired.close))

    def close(self) -> None:
        """Release the remaining objects and end the threads."""
        self._threads.shutdown()
