"""`RangeStreams`: ranges of a store's files, passed on by obstore as they arrive, over few buffers.

Each chunk has a time limit, so a silent server and one that sends a few bytes at a time are both detected; the time
in which the reader processes the bytes does not count. After a failure, only the missing bytes are requested again.
The client of the store must not retry by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from datasvc.errors import UnavailableError
from datasvc.repository.store import obstore_loop, retries
from datasvc.repository.store.obstore_errors import UnsupportedResponseError, convert_errors
from datasvc.repository.store.obstore_loop import CancellationToken

if TYPE_CHECKING:
    from obstore import BytesStream, GetResult
    from obstore.store import ObjectStore

Take = Callable[[memoryview], None]
"""Function that receives the next bytes of a stream. The view is valid only during the call."""

# Smaller chunks take more processor time: 512 KiB a third more.
CHUNK_BYTES: Final = 1 << 20
# Chunks of a stream in memory while one is passed on. With what obstore collects, a stream takes some 4 MiB.
_PREFETCHED_CHUNKS: Final = 2
# After this many bytes without a failure, the next failure counts as the first one again.
_PROGRESS_BYTES: Final = 16 << 20


@dataclass(frozen=True)
class Timeouts:
    """Limits for the time that a client waits for a server.

    Attributes:
        connect_s: maximum time to connect.
        silence_s: maximum time until the headers of a response are complete, and without a byte of it. The default is
            that of botocore: a store may have to load cold data.
        chunk_s: maximum time for `CHUNK_BYTES`: the minimum throughput is some 17 KB/s.
    """

    connect_s: float = 15
    silence_s: float = 60
    chunk_s: float = 60


class RangeStreams:
    """Reader of ranges of one store; thread-safe.

    Args:
        store: client of obstore, without retries.
        timeouts: limits of waiting; its own limits are `connect_s` and `silence_s`.
        attempts: number of failures without progress after which a read ends.
        is_supported: whether obstore can read a response as it is, by the response.
    """

    def __init__(
        self,
        store: ObjectStore,
        timeouts: Timeouts,
        attempts: int,
        is_supported: Callable[[GetResult], bool] = lambda _response: True,
    ) -> None:
        self._store = store
        self._timeouts = timeouts
        self._attempts = attempts
        self._is_supported = is_supported

    def read(
        self, path: str, offset: int, length: int, take: Take, *, location: str, interrupt: CancellationToken
    ) -> None:
        """Pass `length` bytes, at least 1, from `offset` to `take`; for details, see `RangeReader.stream`.

        Also raises UnsupportedResponseError.
        """
        with closing(self._stream(path, offset, offset + length, location, interrupt)) as chunks:
            for chunk in chunks:
                take(memoryview(chunk))

    def _stream(
        self, path: str, start: int, stop: int, location: str, interrupt: CancellationToken
    ) -> Generator[bytes, None, None]:
        """Yield the bytes of a range as they arrive, with a new request for the missing bytes after a failure."""
        offset, num_failures, progress_bytes = start, 0, 0
        while offset < stop:
            try:
                with closing(self._stream_response(path, offset, stop, location, interrupt)) as chunks:
                    for chunk in chunks:
                        offset, progress_bytes = offset + len(chunk), progress_bytes + len(chunk)
                        yield chunk
            except UnsupportedResponseError as error:
                if offset == start:
                    raise  # no byte was passed on, so fsspec's client can read the whole range
                raise UnavailableError(
                    f"cannot read {location}: the server sends a response of another kind than before; try again"
                ) from error
            except UnavailableError:
                num_failures = 1 if progress_bytes >= _PROGRESS_BYTES else num_failures + 1
                progress_bytes = 0
                if num_failures == self._attempts or interrupt.wait(retries.pause_s(num_failures)):
                    raise

    def _stream_response(
        self, path: str, offset: int, stop: int, location: str, interrupt: CancellationToken
    ) -> Generator[bytes, None, None]:
        """Yield the chunks of one response."""
        with retries.map_exceptions("read", location), convert_errors():
            chunks: SimpleQueue[bytes | None] = SimpleQueue()  # None: no chunk follows
            free = asyncio.Semaphore(_PREFETCHED_CHUNKS)
            request = obstore_loop.start(self._receive(path, offset, stop, chunks, free))
            request.add_done_callback(lambda _request: chunks.put(None))
            try:
                with interrupt.on_cancel(request.cancel):
                    while offset < stop:
                        chunk = chunks.get()
                        if interrupt.is_set:
                            raise ConnectionError("the read was cancelled")
                        if chunk is None:
                            obstore_loop.wait(request)  # raises its exception
                            raise ConnectionError(f"the server closed the connection {stop - offset} bytes too early")
                        offset += len(chunk)
                        if offset > stop:
                            raise ConnectionError(f"the server sends {offset - stop} bytes more than it says")
                        yield chunk
                        obstore_loop.run_soon(free.release)
            finally:
                request.cancel()

    async def _receive(
        self, path: str, offset: int, stop: int, chunks: SimpleQueue[bytes | None], free: asyncio.Semaphore
    ) -> None:
        """Request a range and put its chunks into a queue, each when `free` has a place for it."""
        # The next chunk is requested here, and not by the thread that takes it: the socket is read without a pause.
        stream = (await self._request(path, offset, stop)).stream(CHUNK_BYTES)
        while offset < stop:
            await free.acquire()
            chunk = await self._next(stream)
            if not chunk:
                return
            offset += len(chunk)
            chunks.put(chunk)

    async def _request(self, path: str, offset: int, stop: int) -> GetResult:
        response = await self._store.get_async(path, options={"range": (offset, stop)})
        if not self._is_supported(response):
            raise UnsupportedResponseError
        if response.range != (offset, stop):
            first, end = response.range
            raise ConnectionError(f"the server sends the bytes {first}-{end - 1}, expected {offset}-{stop - 1}")
        return response

    async def _next(self, chunks: BytesStream) -> bytes:
        """Return the next chunk, which is shorter than `CHUNK_BYTES` only at the end; b"" after the end."""
        try:
            async with asyncio.timeout(self._timeouts.chunk_s):
                return await obstore_loop.next_of(chunks) or b""
        except TimeoutError as error:
            raise TimeoutError(f"too slow: less than {CHUNK_BYTES} bytes in {self._timeouts.chunk_s:g} s") from error
