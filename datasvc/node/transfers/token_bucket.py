"""Bandwidth caps. The bucket only says how long to wait; whoever asked waits, in a thread or on an event loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class TokenBucket:
    """Lets bytes through at a rate: from any instant on, at most `burst_bytes` and then `rate_bytes_s` a second.

    Callers are served in the order in which they ask. Safe for threads.

    Args:
        rate_bytes_s: above zero.
        burst_bytes: what may pass at once after a pause, above zero; default a tenth of a second's worth. What is
            asked for in one piece passes in one piece, and waits the longer where it is more.
        clock: seconds that never run backwards.
    """

    def __init__(
        self, rate_bytes_s: float, *, burst_bytes: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert rate_bytes_s > 0, rate_bytes_s
        self._rate = rate_bytes_s
        self._burst = rate_bytes_s / 10 if burst_bytes is None else burst_bytes
        assert self._burst > 0, burst_bytes
        self._clock = clock
        self._balance = self._burst  # below zero: bytes that are promised, but whose time has not come
        self._updated = clock()
        self._lock = threading.Lock()

    def reserve(self, num_bytes: int) -> float:
        """Take `num_bytes` out and return the seconds to wait before they may move, all at once."""
        with self._lock:
            now = self._clock()
            self._balance = min(self._burst, self._balance + (now - self._updated) * self._rate)
            self._updated = now
            self._balance -= num_bytes
            return max(0.0, -self._balance / self._rate)
