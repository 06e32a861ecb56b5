"""Holds of resident objects for an event loop: taken and given up in threads, never lost with a cancelled request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from datasvc.cache import Cache
from datasvc.repository import Digest


class Residency:
    """Resident objects of one cache.

    Args:
        cache: any that is open on the folder.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="datasvc-hold")

    @asynccontextmanager
    async def resident(self, digest: Digest) -> AsyncIterator[Path | None]:
        """Yield the object's file, held while the block runs; None where it is not resident."""
        held = ExitStack()
        entering = self._threads.submit(lambda: held.enter_context(self._cache.resident(digest)))
        try:
            yield await asyncio.wrap_future(entering)
        finally:
            # A request may be cancelled while the thread takes the hold: given up when it has it.
            entering.add_done_callback(lambda _: self._threads.submit(held.close))

    def close(self) -> None:
        """Give up what is left and free the threads."""
        self._threads.shutdown()
