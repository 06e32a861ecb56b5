"""Sees a sender that trickles: bytes that arrive, but so few that waiting for them is worth nothing."""

from __future__ import annotations


class MinThroughput:
    """Counts the time spent waiting for the sender alone, not what is done with the bytes.

    Args:
        min_bytes_s: a sender that gives less is too slow.
        window_s: of waiting, over which it is judged.
    """

    def __init__(self, min_bytes_s: float, window_s: float) -> None:
        self._min_bytes_s, self._window_s = min_bytes_s, window_s
        self._num_bytes, self._elapsed_s = 0, 0.0

    def add(self, num_bytes: int, elapsed_s: float) -> None:
        """Count bytes, and how long they were waited for. Raises TimeoutError: too slow."""
        self._num_bytes += num_bytes
        self._elapsed_s += elapsed_s
        if self._elapsed_s < self._window_s:
            return
        if self._num_bytes < self._min_bytes_s * self._elapsed_s:
            raise TimeoutError(f"too slow: {self._num_bytes / self._elapsed_s:.0f} bytes/s")
        self._num_bytes, self._elapsed_s = 0, 0.0
