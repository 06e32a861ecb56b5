"""Where an object can come from: what every source does, and the origin, read by parallel ranged requests.

One request to an object store gives some 35-90 MB/s, so many are under way at once, and their number is bounded over
all objects that a process fetches: one shard is as fast as many, and many ask for no more than one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Literal, Protocol, TypeVar

from datasvc.cache.parts import PART_BYTES
from datasvc.errors import CorruptDataError, UnavailableError
from datasvc.repository import Digest, ObjectInfo

Kind = Literal["origin", "peer"]
Sink = Callable[[int, memoryview], None]
"""Takes the bytes at an offset of the object; the view is valid during the call only."""

T = TypeVar("T")

# Longer requests spend less of their time on latency: 4 % of it at 35 MB/s and 20 ms.
_MAX_PARTS = 4
# What has arrived is written and hashed while the next requests are under way.
_WRITING_THREADS = 4


class Source(Protocol):
    """One place that may have an object.

    Attributes:
        name: for messages.
        kind: what it counts as.
    """

    name: str
    kind: Kind

    def stream(self, info: ObjectInfo, offset: int, length: int, sink: Sink) -> None:
        """Hand `length` bytes from `offset` to `sink`, each byte once.

        The sink may be called from several threads and out of order, but inside a part of `PART_BYTES` in order.
        After this returns or raises it is not called any more.

        Raises:
            NotFoundError: the source lacks the object.
            CorruptDataError: it has something else under the name.
            ConfigError: it refuses.
            UnavailableError: it stopped; what the sink got stays good.
        """

    def judge(self, *, intact: bool) -> None:
        """Learn whether the digest of an object that this source gave bytes of was right."""


class Origin(Protocol):
    """A store that holds the object for good, such as `Objects` of a repository."""

    def read_range(self, digest: Digest, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`. Raises as `Source.stream`."""

    def location(self, digest: Digest) -> str:
        """Return where the object lies, for messages."""


class RequestPool:
    """The requests to origins that this process has under way, over all objects.

    Args:
        num_requests: how many at once, at least 1. Each holds up to 16 MiB of memory, and so do a few more whose
            bytes are being written.
    """

    def __init__(self, num_requests: int = 16) -> None:
        assert num_requests > 0, num_requests
        self._num_requests = num_requests
        self._num_asked = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._turns = threading.Semaphore(num_requests)
        self._threads = ThreadPoolExecutor(num_requests + _WRITING_THREADS, thread_name_prefix="datasvc-origin")

    def submit(self, request: Callable[[], T]) -> Future[T]:
        """Let `request`, which asks inside `turn`, run as soon as it can. Raises UnavailableError when closed."""
        try:
            future = self._threads.submit(request)
        except RuntimeError as error:
            raise UnavailableError("the cache was closed") from error
        with self._lock:
            self._num_asked += 1
        future.add_done_callback(self._done)
        return future

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until one more request may be under way; it is for as long as the block runs.

        Raises UnavailableError when closed meanwhile.
        """
        with self._turns:
            if self._is_closed:
                raise UnavailableError("the cache was closed while an object was on its way")
            yield

    def cut(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges to ask for, in order, each of whole parts of the object.

        Short ones where one object has all requests that there are, and towards its end, so that they end together;
        long ones where others wait.
        """
        with self._lock:
            num_free = self._num_requests - self._num_asked
        spans = []
        while start < stop:
            num_left = -(-(stop - start) // PART_BYTES)
            if num_free > 1:
                num_parts = min(max(1, num_left // num_free), _MAX_PARTS)
            else:
                num_parts = -(-num_left // -(-num_left // _MAX_PARTS))  # no small rest
            end = min(stop, (start // PART_BYTES + num_parts) * PART_BYTES)
            spans.append((start, end))
            start = end
        return spans

    def close(self) -> None:
        """Start no more requests: those that wait for their turn fail. Those under way end by themselves."""
        # Not `cancel_futures`: it leaves whoever waits with `as_completed` waiting for ever.
        self._is_closed = True
        self._threads.shutdown(wait=False)

    def _done(self, _future: Future[T]) -> None:
        with self._lock:
            self._num_asked -= 1


class OriginSource:
    """Reads an object from its origin, several ranges at once; what may be a passing fault is tried again.

    Args:
        origin: the store.
        digest: the object.
        requests: shared by all that this process fetches.
    """

    kind: Kind = "origin"

    def __init__(self, origin: Origin, digest: Digest, requests: RequestPool) -> None:
        self.name = origin.location(digest)
        self._origin = origin
        self._requests = requests

    def stream(self, info: ObjectInfo, offset: int, length: int, sink: Sink) -> None:
        """See `Source`."""
        gate = _Gate(sink)
        futures: list[Future[None]] = []
        try:
            for span in self._requests.cut(offset, offset + length):
                request = _Request(self._origin, self._requests, info.digest, span, gate)
                futures.append(self._requests.submit(request))
            for future in as_completed(futures):
                future.result()
        finally:
            # Requests under way may take their time to fail: they find the gate closed, and nobody waits for them.
            for future in futures:
                future.cancel()
            gate.close()

    def judge(self, *, intact: bool) -> None:
        """See `Source`: there is only one origin, so it is asked again whatever it gave."""


class _Request:
    """One ranged read, until its bytes are handed over."""

    def __init__(
        self, origin: Origin, requests: RequestPool, digest: Digest, span: tuple[int, int], gate: _Gate
    ) -> None:
        self._origin = origin
        self._requests = requests
        self._digest = digest
        self._start, self._stop = span
        self._gate = gate

    def __call__(self) -> None:
        with self._requests.turn():
            content = self._read()
        if content is not None:
            self._gate.deliver(self._start, memoryview(content))

    def _read(self) -> bytes | None:
        """Return the bytes; None where nobody wants them any more."""
        if self._gate.closed.is_set():
            return None
        content = self._origin.read_range(self._digest, self._start, self._stop - self._start)
        expected = self._stop - self._start
        if len(content) != expected:
            raise CorruptDataError(
                f"{self._origin.location(self._digest)} is corrupt: {len(content)} of {expected} bytes at "
                f"{self._start}; restore it from another copy"
            )
        return content


class _Gate:
    """Lets bytes through to a sink until it is closed; nobody is inside any more when `close` returns."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._num_inside = 0
        self._changed = threading.Condition()
        self.closed = threading.Event()

    def deliver(self, offset: int, view: memoryview) -> None:
        with self._changed:
            if self.closed.is_set():
                return
            self._num_inside += 1
        try:
            self._sink(offset, view)
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self.closed.set()
            self._changed.wait_for(lambda: self._num_inside == 0)
