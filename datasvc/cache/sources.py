"""Where an object can come from: what every source does, and the origin, read by parallel ranged requests.

One request to an object store gives some 35-90 MB/s, so many are under way at once, and their number is bounded over
all objects that a process fetches: one shard is as fast as many, and many ask for no more than one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
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
        self.num_requests = num_requests
        self._num_objects = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._turns = threading.Semaphore(num_requests)
        self._threads = ThreadPoolExecutor(num_requests + _WRITING_THREADS, thread_name_prefix="datasvc-origin")

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Let `work`, which asks inside `turn`, run as soon as it can. Raises UnavailableError when closed."""
        try:
            return self._threads.submit(work)
        except RuntimeError as error:
            raise UnavailableError("the cache was closed") from error

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Count one more object among those that share the requests, for as long as the block runs."""
        with self._lock:
            self._num_objects += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_objects -= 1

    @contextmanager
    def turn(self) -> Iterator[int]:
        """Wait until one more request may be under way; it is for as long as the block runs.

        Yields:
            How many requests an object may have under way, were they shared equally: at least 1.

        Raises:
            UnavailableError: closed meanwhile.
        """
        with self._turns:
            if self._is_closed:
                raise UnavailableError("the cache was closed while an object was on its way")
            yield max(1, self.num_requests // max(1, self._num_objects))

    def close(self) -> None:
        """Start no more requests: those that wait for their turn fail. Those under way end by themselves."""
        # Not `cancel_futures`: it leaves whoever waits with `as_completed` waiting for ever.
        self._is_closed = True
        self._threads.shutdown(wait=False)


class Spans:
    """What of a range nobody has asked for yet, cut into ranges of whole parts of the object.

    Each cut is made when its request begins: long where requests are shared with other objects, because latency is
    paid once a request; short where one object has them to itself, and towards its end, so that they end together.

    Args:
        start: of the range.
        stop: its end.
    """

    def __init__(self, start: int, stop: int) -> None:
        self._start, self._stop = start, stop
        self._lock = threading.Lock()

    @property
    def num_parts(self) -> int:
        """How many parts are left."""
        return -(-self._stop // PART_BYTES) - self._start // PART_BYTES if self._start < self._stop else 0

    def take(self, share: int) -> tuple[int, int] | None:
        """Return what to ask for next, None where nothing is left.

        Args:
            share: requests that the object may have under way.
        """
        with self._lock:
            start, left = self._start, self.num_parts
            if not left:
                return None
            alone = -(-left // -(-left // _MAX_PARTS))  # no small rest
            num_parts = alone if share == 1 else min(max(1, left // share), _MAX_PARTS)
            self._start = min(self._stop, (start // PART_BYTES + num_parts) * PART_BYTES)
            return start, self._start


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
        """See `Source`."""
        assert info.digest == self._digest
        gate, spans = _Gate(sink), Spans(offset, offset + length)
        futures: list[Future[None]] = []
        with self._requests.sharing():
            try:
                num_asking = min(self._requests.num_requests, spans.num_parts)
                futures.extend(self._requests.submit(partial(self._ask, spans, gate)) for _ in range(num_asking))
                for future in as_completed(futures):
                    future.result()
            finally:
                # Requests under way may take their time to fail: they find the gate closed; nobody waits for them.
                for future in futures:
                    future.cancel()
                gate.close()

    def judge(self, *, intact: bool) -> None:
        """See `Source`: there is only one origin, so it is asked again whatever it gave."""

    def _ask(self, spans: Spans, gate: _Gate) -> None:
        """Bring one range after the other until none is left, or nobody wants them any more."""
        while True:
            with self._requests.turn() as share:
                span = None if gate.closed.is_set() else spans.take(share)
                if span is None:
                    return
                content = self._read(*span)
            gate.deliver(span[0], memoryview(content))

    def _read(self, start: int, stop: int) -> bytes:
        content = self._origin.read_range(self._digest, start, stop - start)
        if len(content) != stop - start:
            raise CorruptDataError(
                f"{self.name} is corrupt: {len(content)} of {stop - start} bytes at {start}; restore it from another "
                "copy"
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
