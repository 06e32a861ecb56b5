"""Divides the range of an object into requests, and passes on the bytes of the answers.

`RangeRequests` chooses the requests, and `OriginSource` sends them. `RequestGate` passes the received bytes to the
incoming file until the transfer ends.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from datasvc.repository.store.obstore_loop import CancellationToken

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
