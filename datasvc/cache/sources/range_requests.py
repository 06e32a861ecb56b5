"""Divides the range of an object into requests, and passes on the bytes of the answers.

`RangeRequests` chooses the requests, and `OriginSource` sends them. `RequestGate` passes the received bytes to the
incoming file until the transfer ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from datasvc.cache.sources.received_parts import PART_BYTES
from datasvc.repository.store.cancellation import CancellationToken

Sink = Callable[[int, memoryview], None]
"""Receives the bytes at an offset of the object; the view is valid during the call only."""

# A longer request spends a smaller share of its time on latency: 4 parts at 35 MB/s lose 4 % to a latency of 20 ms.
# An answer that is collected needs as much memory as its length.
GATHERED_PARTS: Final = 4
"""Maximum number of parts of a request whose answer is collected in memory."""
STREAMED_PARTS: Final = 16
"""Maximum number of parts of a request whose answer is passed on as it arrives."""


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
