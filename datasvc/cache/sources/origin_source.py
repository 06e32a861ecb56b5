"""Where an object can come from: what every source does, and the origin, read by parallel ranged requests.

One request to an object store gives some 35-90 MB/s, so many are under way at once, and their number is bounded over
all objects that a process fetches: one shard is as fast as many, and many ask for no more than one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from typing import Literal, Protocol, TypeVar

from datasvc.cache.sources.range_requests import GATHERED_PARTS, STREAMED_PARTS, Spans
from datasvc.cache.sources.request_gate import Gate, Sink
from datasvc.errors import CorruptDataError, UnavailableError
from datasvc.repository import Digest, ObjectInfo
from datasvc.repository.store.cancellation import CancellationToken
from datasvc.repository.store.http_stream import Take

Kind = Literal["origin", "peer"]

T = TypeVar("T")

# What was gathered is written and hashed while the next requests are under way.
_WRITING_THREADS = 4


class ObjectSource(Protocol):
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

    @property
    def can_stream(self) -> bool:
        """Whether `stream_range` needs little memory, however long the range."""

    def read_range(self, digest: Digest, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`. Raises as `ObjectSource.stream`."""

    def stream_range(
        self, digest: Digest, offset: int, length: int, take: Take, interrupt: CancellationToken
    ) -> None:
        """Hand `length` bytes from `offset` to `take` as they arrive, in order, from the calling thread.

        Raises as `ObjectSource.stream`, and UnavailableError soon after it was interrupted.
        """

    def location(self, digest: Digest) -> str:
        """Return where the object lies, for messages."""


_pools: weakref.WeakSet[RequestPool] = weakref.WeakSet()


def _close_all() -> None:
    """End all requests: a program that ends must not wait for a silent server."""
    for pool in list(_pools):
        pool.close()


# Exit handlers run after threads were waited for, which is too late.
if hasattr(threading, "_register_atexit"):
    threading._register_atexit(_close_all)  # noqa: SLF001


class RequestPool:
    """The requests to origins that this process has under way, over all objects.

    Args:
        num_requests: how many at once, at least 1. Where the store's client can stream each holds 512 KiB of memory,
            otherwise up to 16 MiB, and so do a few more whose bytes are being written.
    """

    def __init__(self, num_requests: int = 16) -> None:
        assert num_requests > 0, num_requests
        self.num_requests = num_requests
        self._under_way: set[CancellationToken] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._turns = threading.Semaphore(num_requests)
        self._threads = ThreadPoolExecutor(num_requests + _WRITING_THREADS, thread_name_prefix="datasvc-origin")
        _pools.add(self)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Let `work`, which asks inside `turn`, run as soon as it can. Raises UnavailableError when closed."""
        try:
            return self._threads.submit(work)
        except RuntimeError as error:
            raise UnavailableError("the cache was closed") from error

    @contextmanager
    def sharing(self, interrupt: CancellationToken) -> Iterator[None]:
        """Count one more object among those that share the requests, for as long as the block runs.

        Args:
            interrupt: of its requests; set when this is closed.
        """
        with self._lock:
            self._under_way.add(interrupt)
        try:
            yield
        finally:
            with self._lock:
                self._under_way.remove(interrupt)

    @contextmanager
    def turn(self) -> Iterator[int]:
        """Wait until one more request may be under way; it is for as long as the block runs.

        Yields:
            How many requests an object may have under way, were they shared equally: at least 1.

        Raises:
            UnavailableError: closed meanwhile.
        """
        with self._turns:
            self.check_open()
            yield max(1, self.num_requests // max(1, len(self._under_way)))

    def check_open(self) -> None:
        """Raise UnavailableError when this was closed."""
        if self._is_closed:
            raise UnavailableError("the cache was closed while an object was on its way")

    def close(self) -> None:
        """End all requests: those that wait for their turn fail. What cannot be interrupted ends by itself."""
        # Not `cancel_futures`: it leaves whoever waits with `as_completed` waiting for ever.
        self._is_closed = True
        with self._lock:
            under_way = list(self._under_way)
        for interrupt in under_way:
            interrupt.set()
        self._threads.shutdown(wait=False)


class OriginSource:
    """Reads an object from its origin, several ranges at once.

    Args:
        origin: the store.
        digest: the object.
        requests: shared by all that this process fetches.
    """

    kind: Kind = "origin"

    def __init__(self, origin: Origin, digest: Digest, requests: RequestPool) -> None:
        self.name = origin.location(digest)
        self._origin = origin
        self._digest = digest
        self._requests = requests

    def stream(self, info: ObjectInfo, offset: int, length: int, sink: Sink) -> None:
        """See `ObjectSource`."""
        assert info.digest == self._digest
        # Once for the object: an origin that turns out not to stream must not gather what was cut for streaming.
        ask, most_parts = (
            (self._stream, STREAMED_PARTS) if self._origin.can_stream else (self._gather, GATHERED_PARTS)
        )
        gate, spans = Gate(sink), Spans(offset, offset + length, most_parts)
        futures: list[Future[None]] = []
        with self._requests.sharing(gate.interrupt):
            try:
                num_asking = min(self._requests.num_requests, spans.num_parts)
                futures.extend(self._requests.submit(partial(ask, spans, gate)) for _ in range(num_asking))
                for future in as_completed(futures):
                    future.result()
            finally:
                # Requests that cannot be interrupted find the gate closed; nobody waits for them.
                for future in futures:
                    future.cancel()
                gate.close()

    def judge(self, *, intact: bool) -> None:
        """See `ObjectSource`: there is only one origin, so it is asked again whatever it gave."""

    def _gather(self, spans: Spans, gate: Gate) -> None:
        """Bring one range after the other until none is left, or nobody wants them any more."""
        while True:
            with self._requests.turn() as share:
                span = None if gate.interrupt.is_set else spans.take(share)
                if span is None:
                    return
                content = self._read(*span)
            gate.deliver(span[0], memoryview(content))

    def _stream(self, spans: Spans, gate: Gate) -> None:
        """Likewise, each as it arrives."""
        while True:
            with self._requests.turn() as share:
                span = None if gate.interrupt.is_set else spans.take(share)
                if span is None:
                    return
                self._stream_one(*span, gate)

    def _stream_one(self, start: int, stop: int, gate: Gate) -> None:
        offset = start

        def take(view: memoryview) -> None:
            nonlocal offset
            gate.deliver(offset, view)
            offset += len(view)

        try:
            self._origin.stream_range(self._digest, start, stop - start, take, gate.interrupt)
        except UnavailableError:
            self._requests.check_open()
            raise

    def _read(self, start: int, stop: int) -> bytes:
        content = self._origin.read_range(self._digest, start, stop - start)
        if len(content) != stop - start:
            raise CorruptDataError(
                f"{self.name} is corrupt: {len(content)} of {stop - start} bytes at {start}; restore it from another "
                "copy"
            )
        return content
