"""Limit bandwidth by a token bucket. It only computes the wait; the caller waits, in a thread or an event loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class TokenBucket:
    """Limits bytes to a rate: in any period, at most `burst_bytes` plus `rate_bytes_s` for each second.

    Callers are served in the order of their calls. Thread-safe.

    Args:
        rate_bytes_s: bytes per second, above zero.
        burst_bytes: bytes that may pass at once after a pause, above zero; default: those of a tenth of a second. A
            larger reservation passes in one piece after a longer wait.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, rate_bytes_s: float, *, burst_bytes: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert rate_bytes_s > 0, rate_bytes_s
        self._rate = rate_bytes_s
        self._burst = rate_bytes_s / 10 if burst_bytes is None else burst_bytes
        assert self._burst > 0, burst_bytes
        self._clock = clock
        self._balance = self._burst  # below zero: bytes that are reserved ahead of time
        self._updated = clock()
        self._lock = threading.Lock()

    def reserve(self, num_bytes: int) -> float:
        """Reserve `num_bytes`; return the seconds to wait before all of them may be transferred."""
        with self._lock:
            now = self._clock()
            self._balance = min(self._burst, self._balance + (now - self._updated) * self._rate)
            self._updated = now
            # It may become negative: later callers then wait longer, so the order of calls is kept.
            self._balance -= num_bytes
            return max(0.0, -self._balance / self._rate)
