"""Detection of a sender whose throughput is too low, although bytes still arrive.

A timeout for silence never ends a stream that sends a few bytes at a time.
"""

from __future__ import annotations


class MinThroughput:
    """Check of a sender's throughput over the time that a receiver waits for it.

    The time in which the receiver processes the bytes does not count. Each window is checked on its own, so a fast
    start does not hide a later stall.

    Args:
        min_bytes_s: minimum throughput in bytes per second.
        window_s: length of a window in seconds of waiting.
    """

    def __init__(self, min_bytes_s: float, window_s: float) -> None:
        self._min_bytes_s, self._window_s = min_bytes_s, window_s
        self._num_bytes, self._elapsed_s = 0, 0.0

    def add(self, num_bytes: int, elapsed_s: float) -> None:
        """Count received bytes and the time waited for them.

        Raises:
            TimeoutError: the throughput of the last window is below the minimum.
        """
        self._num_bytes += num_bytes
        self._elapsed_s += elapsed_s
        if self._elapsed_s < self._window_s:
            return
        if self._num_bytes < self._min_bytes_s * self._elapsed_s:
            rate = self._num_bytes / self._elapsed_s
            raise TimeoutError(f"too slow: {rate:.0f} bytes/s, expected at least {self._min_bytes_s:.0f}")
        self._num_bytes, self._elapsed_s = 0, 0.0
