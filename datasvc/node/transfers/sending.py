"""Send files as response bodies: in large writes, in a limited number of streams, under a common rate limit.

The routes of `/objects` use it. A stream is one response in progress. Under a rate limit, few streams run at a time,
because a peer ends a stream that is too slow.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from aiohttp import web

from datasvc.errors import UnavailableError
from datasvc.node.transfers.origins import TokenBucket

# Measured on loopback: writes of 4 MiB are 1.6 times as fast as sendfile.
_MAX_WRITE_BYTES = 4 << 20
_MIN_WRITE_BYTES = 64 << 10
_MAX_STREAMS = 32  # each has a buffer of up to `_MAX_WRITE_BYTES`
# Twice the 1 MiB/s below which a peer ends a stream, see `PeerSettings.min_bytes_s`.
_MIN_STREAM_BYTES_S = 2 << 20
STALL_TIMEOUT_S: Final = 30.0
# Progress does not wake the waiting coroutine, so the coroutine asks for the idle time at this interval.
_POLL_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class StreamPlan:
    """The number of concurrent streams, and the size of each write."""

    num_streams: int
    write_bytes: int


def plan_streams(rate_bytes_s: int | None) -> StreamPlan:
    """Return the plan for a limit in bytes per second; None: no limit.

    Under a limit, there are few enough streams that no peer ends one as too slow, and each write takes at most 1 s.
    """
    if rate_bytes_s is None:
        return StreamPlan(_MAX_STREAMS, _MAX_WRITE_BYTES)
    num_streams = max(1, min(_MAX_STREAMS, rate_bytes_s // _MIN_STREAM_BYTES_S))
    return StreamPlan(num_streams, max(_MIN_WRITE_BYTES, min(_MAX_WRITE_BYTES, rate_bytes_s // num_streams)))


@dataclass
class Sent:
    """Counters of the responses since the start.

    Attributes:
        size_bytes: bytes of bodies, including responses that were cut short.
        num_objects: number of complete responses.
        num_broken: number of responses that were cut short, by the peer or by damage of the file.
        num_streams: number of responses in progress.
    """

    size_bytes: int = 0
    num_objects: int = 0
    num_broken: int = 0
    num_streams: int = 0


class Sender:
    """Sends ranges of files. Belongs to one event loop.

    Args:
        rate_bytes_s: limit of all streams together; None: no limit.
        count: called in a thread with the number of bytes of each response.
        stall_timeout_s: a peer that receives nothing for longer is disconnected, because an object cannot be evicted
            while it is sent.
    """

    def __init__(
        self,
        rate_bytes_s: int | None = None,
        *,
        count: Callable[[int], None],
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        self.sent = Sent()
        self._plan = plan_streams(rate_bytes_s)
        self._bucket = None if rate_bytes_s is None else TokenBucket(rate_bytes_s)
        self._count = count
        self._stall_timeout_s = stall_timeout_s
        self._slots = asyncio.Semaphore(self._plan.num_streams)
        self._buffers: list[memoryview] = []
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="datasvc-read")
        self._progressed_at = 0.0  # time of the last write of any response, on the clock of the event loop

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[None]:
        """Wait until another stream may run, and count as one while the block runs.

        Raises UnavailableError if no stream makes progress during the wait, see `wait_for_progress`.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        slot = loop.create_task(self._slots.acquire())
        try:
            await wait_for_progress(slot, idle_s=lambda: loop.time() - max(started, self._progressed_at))
        except BaseException:
            slot.cancel()
            # The task may have acquired the slot before its cancellation. If so, release the slot.
            slot.add_done_callback(self._release_slot)
            raise
        self.sent.num_streams += 1
        try:
            yield
        finally:
            self.sent.num_streams -= 1
            self._slots.release()

    async def send(
        self, request: web.Request, response: web.StreamResponse, file: int, start: int, stop: int
    ) -> None:
        """Send a response whose body is a range of a file.

        Args:
            request: request of the response.
            response: response with `Content-Length` set, not prepared yet.
            file: descriptor of the file.
            start: offset of the first byte in the file.
            stop: offset after the last byte.

        Raises:
            ConnectionResetError: the response was cut short, and its connection is closed, so that the peer notices.
        """
        buffer = self._buffers.pop() if self._buffers else memoryview(bytearray(self._plan.write_bytes))
        sent_bytes = 0
        try:
            async for num_bytes in self._send_pieces(request, response, file, start, stop, buffer):
                sent_bytes += num_bytes
                self.sent.size_bytes += num_bytes
                self._progressed_at = asyncio.get_running_loop().time()
        except (OSError, TimeoutError, EOFError) as error:
            self.sent.num_broken += 1
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError(f"{request.path} was cut short: {error}") from error
        except asyncio.CancelledError:  # the peer has disconnected
            self.sent.num_broken += 1
            raise
        else:
            self.sent.num_objects += 1
            self._buffers.append(buffer)  # only here: after a failed write, the transport may still use the buffer
        finally:
            self._threads.submit(self._count, sent_bytes)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _release_slot(self, slot: asyncio.Task[bool]) -> None:
        if not slot.cancelled():
            self._slots.release()

    async def _send_pieces(
        self, request: web.Request, response: web.StreamResponse, file: int, start: int, stop: int, buffer: memoryview
    ) -> AsyncIterator[int]:
        """Send piece by piece; yield the number of bytes of each piece that was sent."""
        loop = asyncio.get_running_loop()
        writer = await response.prepare(request)
        assert writer is not None
        assert request.transport is not None
        # The next read overwrites the buffer, so `drain` must wait until the transport has sent all bytes: the limit
        # is 0. A TLS transport has a copy of the bytes, and with a limit of 0 its `drain` would never return.
        is_secure = request.transport.get_extra_info("sslcontext") is not None
        request.transport.set_write_buffer_limits(high=1 if is_secure else 0)
        writer.send_headers()  # now: otherwise aiohttp copies the first piece to send it with the headers
        for offset in range(start, stop, len(buffer)):
            piece = buffer[: min(len(buffer), stop - offset)]
            if self._bucket is not None:
                await asyncio.sleep(self._bucket.reserve(len(piece)))
            await loop.run_in_executor(self._threads, _read_full, file, piece, offset)
            async with asyncio.timeout(self._stall_timeout_s):
                await writer.write(piece)
                await writer.drain()
            yield len(piece)
        await response.write_eof()


def _read_full(file: int, piece: memoryview, offset: int) -> None:
    """Fill `piece` from a file at `offset`. Raises EOFError if the file is shorter, or OSError."""
    filled = 0
    while filled < len(piece):
        count = os.preadv(file, [piece[filled:]], offset + filled)
        if not count:
            raise EOFError(f"the file ends at byte {offset + filled}")
        filled += count


# Other requests may wait for the same fetch, so a wait that ends early does not cancel the fetch.


async def wait_for_progress(
    future: asyncio.Future[T], *, idle_s: Callable[[], float], stall_timeout_s: float = STALL_TIMEOUT_S
) -> T:
    """Return the result of `future`, which is not cancelled if this wait ends first.

    Args:
        future: future to wait for.
        idle_s: returns the seconds since the last progress of the work.
        stall_timeout_s: maximum time without progress. It also ends a circular wait, such as that of a node that is
            configured to request objects from itself under another name.

    Raises:
        UnavailableError: there was no progress for longer than `stall_timeout_s`.
        BaseException: the exception of the future.
    """
    while not future.done():
        await asyncio.wait([future], timeout=min(_POLL_S, stall_timeout_s))
        if not future.done() and idle_s() > stall_timeout_s:
            raise UnavailableError(f"no progress for {stall_timeout_s:g} s; try another node, or try again later")
    return future.result()
