"""Sources of objects: the interface of every source, and the origin, read by parallel ranged requests.

One request to an object store transfers some 35-90 MB/s, so many run at once. Their number is limited per process,
not per object: one shard alone can use all requests, and many shards share them.
"""

from __future__ import annotations

import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, Literal, Protocol, Self, TypeVar

from datasvc.errors import CorruptDataError, UnavailableError
from datasvc.repository import Digest, ObjectInfo
from datasvc.repository.store.obstore_loop import CancellationToken
from datasvc.repository.store.ranges import Take
from datasvc.threads import run_before_threads_end

Kind = Literal["origin", "peer"]

T = TypeVar("T")

# Threads in addition to one per request, to write and hash complete answers while the next requests are in progress.
_WRITING_THREADS = 4


Sink = Callable[[int, memoryview], None]
"""Receives the bytes at an offset of the object; the view is valid during the call only."""

# A longer request spends a smaller share of its time on latency: 4 parts at 35 MB/s lose 4 % to a latency of 20 ms.
# An answer that is collected needs as much memory as its length.
GATHERED_PARTS: Final = 4
"""Maximum number of parts of a request whose answer is collected in memory."""
STREAMED_PARTS: Final = 16
"""Maximum number of parts of a request whose answer is passed on as it arrives."""


PART_BYTES: Final = 4 << 20
# A part number and its complement, so that zeros or half a record are recognised as invalid.
_RECORD = struct.Struct("<II")
_COMPLEMENT = 0xFFFFFFFF


class ObjectSource(Protocol):
    """A store or a node from which an object can be read.

    Attributes:
        name: name of the source, for messages.
        kind: kind of the source, for counters.
    """

    name: str
    kind: Kind

    def stream(self, info: ObjectInfo, offset: int, length: int, sink: Sink) -> None:
        """Pass `length` bytes from `offset` to `sink`, each byte once.

        The sink may be called from several threads. Parts (`PART_BYTES` bytes each) may arrive in any
        order, and the bytes inside one part arrive in order. The sink is not called after the end of this method.

        Raises:
            NotFoundError: the source does not have the object.
            CorruptDataError: the source has another object under this name.
            ConfigError: the source refuses the request.
            UnavailableError: the transfer ended before all bytes arrived; the bytes passed so far are valid.
        """

    def record_integrity(self, *, intact: bool) -> None:
        """Record whether a complete object, with bytes from this source, had the right digest."""


class Origin(Protocol):
    """The permanent store of an object, such as the `Objects` of a repository."""

    @property
    def can_stream(self) -> bool:
        """Whether `stream_range` needs little memory for a range of any length."""

    def read_range(self, digest: Digest, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`. Raises the errors of `ObjectSource.stream`."""

    def stream_range(
        self, digest: Digest, offset: int, length: int, take: Take, interrupt: CancellationToken
    ) -> None:
        """Pass `length` bytes from `offset` to `take` as they arrive, in order, from the calling thread.

        Raises the errors of `ObjectSource.stream`, and UnavailableError soon after `interrupt` is set.
        """

    def location(self, digest: Digest) -> str:
        """Return the location of the object, for messages."""


_pools: weakref.WeakSet[RequestPool] = weakref.WeakSet()


def _close_all() -> None:
    """End all requests, so that the exit of the program does not wait for a server that does not answer."""
    for pool in list(_pools):
        pool.close()


run_before_threads_end(_close_all)


class RequestPool:
    """Limits the requests to origins that this process has in progress, over all objects, and runs them.

    Args:
        num_requests: maximum number of requests at once, at least 1. Each needs some 4 MiB of memory if the store's
            client can stream. Otherwise each needs up to 16 MiB, and `_WRITING_THREADS` more answers may be in memory
            until they are written.
    """

    def __init__(self, num_requests: int = 16) -> None:
        assert num_requests > 0, num_requests
        self.num_requests = num_requests
        self._interrupts: set[CancellationToken] = set()  # one per object in transfer
        self._lock = threading.Lock()
        self._is_closed = False
        self._slots = threading.Semaphore(num_requests)
        self._threads = ThreadPoolExecutor(num_requests + _WRITING_THREADS, thread_name_prefix="datasvc-origin")
        _pools.add(self)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in a thread; it must send each request inside `slot`. Raises UnavailableError after `close`."""
        try:
            return self._threads.submit(work)
        except RuntimeError as error:  # raised by the executor after its shutdown
            raise UnavailableError("the cache was closed; open it again to fetch objects") from error

    @contextmanager
    def sharing(self, interrupt: CancellationToken) -> Iterator[None]:
        """Count an object as in transfer inside the block; `close` sets `interrupt`, which ends its requests."""
        with self._lock:
            self._interrupts.add(interrupt)
        try:
            yield
        finally:
            with self._lock:
                self._interrupts.remove(interrupt)

    @contextmanager
    def slot(self) -> Iterator[int]:
        """Wait for a free slot, and occupy it for one request inside the block.

        Yields:
            Equal share of the slots for each object in transfer, at least 1.

        Raises:
            UnavailableError: the pool was closed.
        """
        with self._slots:
            # Checked inside the slot, because the pool may have been closed during the wait.
            self.check_open()
            yield max(1, self.num_requests // max(1, len(self._interrupts)))

    def check_open(self) -> None:
        """Raise UnavailableError if the pool was closed."""
        if self._is_closed:
            raise UnavailableError("the cache was closed during the transfer of an object")

    def close(self) -> None:
        """Cancel all requests; those that wait for a slot fail. A request that cannot be cancelled ends by itself."""
        self._is_closed = True
        with self._lock:
            interrupts = list(self._interrupts)
        for interrupt in interrupts:
            interrupt.set()
        # `cancel_futures` is not used: with it, a thread that waits in `as_completed` would never return.
        self._threads.shutdown(wait=False)


class OriginSource:
    """The origin as the source of one object, read by several ranged requests at once.

    All objects that a process fetches share one `RequestPool`.
    """

    kind: Kind = "origin"

    def __init__(self, origin: Origin, digest: Digest, requests: RequestPool) -> None:
        self.name = origin.location(digest)
        self._origin = origin
        self._digest = digest
        self._requests = requests

    def stream(self, info: ObjectInfo, offset: int, length: int, sink: Sink) -> None:
        """Pass the bytes to the sink, by several requests at once. For errors see `ObjectSource.stream`."""
        assert info.digest == self._digest
        # Read once: if `can_stream` became False during the transfer, ranges whose length was chosen for streaming
        # would be too long to be collected in memory.
        is_streamed = self._origin.can_stream
        gate = RequestGate(sink)
        ranges = RangeRequests(offset, offset + length, STREAMED_PARTS if is_streamed else GATHERED_PARTS)
        transfer = partial(self._transfer, ranges, gate, is_streamed=is_streamed)
        futures: list[Future[None]] = []
        with self._requests.sharing(gate.interrupt):
            try:
                num_threads = min(self._requests.num_requests, ranges.num_parts)
                futures.extend(self._requests.submit(transfer) for _ in range(num_threads))
                for future in as_completed(futures):
                    future.result()
            finally:
                # Do not wait for a request that cannot be cancelled: the closed gate drops its bytes.
                for future in futures:
                    future.cancel()
                gate.close()

    def record_integrity(self, *, intact: bool) -> None:
        """Do nothing: there is one origin, which is used even after wrong bytes."""

    def _transfer(self, ranges: RangeRequests, gate: RequestGate, *, is_streamed: bool) -> None:
        """Read one range after another, until all are requested or the gate is closed; runs in several threads."""
        while True:
            with self._requests.slot() as num_concurrent:
                span = None if gate.interrupt.is_set else ranges.take(num_concurrent)
                if span is None:
                    return
                if is_streamed:
                    self._stream(*span, gate)
                    continue
                content = self._read(*span)
            # Deliver outside the slot, so that the next request runs while these bytes are written.
            gate.deliver(span[0], memoryview(content))

    def _stream(self, start: int, stop: int, gate: RequestGate) -> None:
        """Deliver the bytes of a range as they arrive."""
        offset = start

        def receive(view: memoryview) -> None:
            nonlocal offset
            gate.deliver(offset, view)
            offset += len(view)

        try:
            self._origin.stream_range(self._digest, start, stop - start, receive, gate.interrupt)
        except UnavailableError:
            # After `close`, report the closed cache instead of the cancelled request.
            self._requests.check_open()
            raise

    def _read(self, start: int, stop: int) -> bytes:
        content = self._origin.read_range(self._digest, start, stop - start)
        if len(content) != stop - start:
            raise CorruptDataError(
                f"{self.name} is corrupt: {len(content)} of {stop - start} expected bytes at offset {start}; restore "
                "it from another copy"
            )
        return content


# `RangeRequests` chooses the requests, and `OriginSource` sends them. `RequestGate` passes the received bytes to the
# incoming file until the transfer ends.


class RangeRequests:
    """Divides a range of an object into requests of whole parts. Safe for threads.

    The length of each request is chosen when the request starts. It is long while the object has one request at a
    time, because every request pays the latency once. It is shorter while the object has several requests, so that
    its first bytes arrive soon and can be hashed during the transfer. It is short at the end of the range, so that
    all requests end at about the same time.

    Args:
        start: first byte of the range.
        stop: first byte after the range.
        max_parts: maximum number of parts of a request while the object has one request at a time; while it has
            several, the maximum is `GATHERED_PARTS`.
    """

    def __init__(self, start: int, stop: int, max_parts: int) -> None:
        self._start, self._stop = start, stop
        self._max_parts = max_parts
        self._lock = threading.Lock()

    @property
    def num_parts(self) -> int:
        """Number of parts that are not yet requested."""
        if self._start >= self._stop:
            return 0
        # The first and the last part may be partial.
        return -(-self._stop // PART_BYTES) - self._start // PART_BYTES

    def take(self, num_concurrent: int) -> tuple[int, int] | None:
        """Return start and stop of the next request; None if the whole range has been requested.

        Args:
            num_concurrent: number of requests that the object may have in progress at once.
        """
        with self._lock:
            start, num_parts = self._start, self.num_parts
            if not num_parts:
                return None
            if num_concurrent == 1:
                num_requests = -(-num_parts // self._max_parts)
                length_parts = -(-num_parts // num_requests)  # equal lengths: no short last request
            else:
                length_parts = min(max(1, num_parts // num_concurrent), GATHERED_PARTS)
            self._start = min(self._stop, (start // PART_BYTES + length_parts) * PART_BYTES)
            return start, self._start


class RequestGate:
    """Passes the bytes of requests to a sink until `close`. After `close` has returned, the sink is not called.

    A request that cannot be cancelled in time may continue after `close`; its bytes are dropped.

    Attributes:
        interrupt: cancels the requests. When it is set, the gate drops further bytes; running sink calls continue.
    """

    def __init__(self, sink: Sink) -> None:
        self.interrupt = CancellationToken()
        self._sink = sink
        self._num_calls = 0
        self._changed = threading.Condition()

    def deliver(self, offset: int, view: memoryview) -> None:
        """Pass bytes to the sink, or drop them if the gate is closed. Errors of the sink are raised."""
        with self._changed:
            if self.interrupt.is_set:
                return
            self._num_calls += 1
        try:
            self._sink(offset, view)
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Cancel the requests that can be cancelled, drop the bytes of the others, and wait for calls in progress."""
        with self._changed:
            self.interrupt.set()
            self._changed.wait_for(lambda: self._num_calls == 0)


# A part is `PART_BYTES` of the object; the last part may be shorter. The list is only a hint. A part is added after
# its bytes were written, but a power cut may keep the part in the list and lose its bytes. So a resumed file is
# accepted only if the digest of the complete object is right. An invalid list restarts the fetch.


class ReceivedParts:
    """The received parts of one object. The caller has locked the incoming file while this list is open.

    Args:
        path: file of the list, created if missing.
        size_bytes: size of the object.

    Raises:
        OSError: the file cannot be created or read.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._header = f"datasvc parts 1 {PART_BYTES} {size_bytes}\n".encode()
        self.size_bytes = size_bytes
        self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            arrived = self._parse(os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0))
            self._arrived = arrived or set()
            if arrived is None:
                self.clear()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; it is kept to resume the fetch."""
        os.close(self._descriptor)

    @property
    def num_parts(self) -> int:
        """Number of parts of the complete object."""
        return -(-self.size_bytes // PART_BYTES)

    @property
    def arrived(self) -> frozenset[int]:
        """Numbers of the received parts."""
        return frozenset(self._arrived)

    def add(self, number: int) -> None:
        """Add a part whose bytes are all written. Raises OSError."""
        assert 0 <= number < self.num_parts, number
        os.write(self._descriptor, _RECORD.pack(number, number ^ _COMPLEMENT))
        self._arrived.add(number)

    def clear(self) -> None:
        """Empty the list, because the received bytes are wrong. Raises OSError."""
        self._arrived = set()
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, self._header)

    def _parse(self, content: bytes) -> set[int] | None:
        """Return the part numbers in the file; None if it is not a valid list for an object of this size."""
        body = content.removeprefix(self._header)
        has_header = len(body) < len(content)
        if not has_header or len(body) % _RECORD.size:
            return None
        records = list(_RECORD.iter_unpack(body))
        if any(number ^ _COMPLEMENT != check or number >= self.num_parts for number, check in records):
            return None
        return {number for number, _ in records}
