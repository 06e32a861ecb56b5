"""Token bucket: limits the bytes per second that a node sends to others, or reads from its origins.

It only computes how long to wait; its callers wait. Therefore threads and coroutines can use the same class.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class TokenBucket:
    """Limits bytes to a rate: in any period, at most `rate_bytes_s` per second, plus the bytes of 0.1 s (the burst).

    After a pause, the burst passes without a wait. A reservation may be larger than the burst, and then waits longer.
    Callers are served in the order of their calls. Thread-safe.

    Args:
        rate_bytes_s: bytes per second, above zero.
        clock: returns monotonic seconds.
    """

    def __init__(self, rate_bytes_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        assert rate_bytes_s > 0, rate_bytes_s
        self._rate = rate_bytes_s
        self._burst = rate_bytes_s / 10
        self._clock = clock
        self._balance = self._burst  # bytes that may pass now; negative after a reservation that must wait
        self._updated = clock()
        self._lock = threading.Lock()

    def reserve(self, num_bytes: int) -> float:
        """Reserve `num_bytes`; return the seconds to wait before all of them may be transferred."""
        with self._lock:
            now = self._clock()
            self._balance = min(self._burst, self._balance + (now - self._updated) * self._rate)
            self._updated = now
            # The balance may become negative: later callers then wait longer, so the order of calls is kept.
            self._balance -= num_bytes
            return max(0.0, -self._balance / self._rate)
