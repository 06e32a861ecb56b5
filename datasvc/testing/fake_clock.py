"""A clock that only a test advances."""

from __future__ import annotations


class FakeClock:
    """Stands in for `time.monotonic` where a `clock` is taken.

    Attributes:
        now_s: time that the next call returns, in seconds.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Return the current time in seconds."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass; `seconds` is not negative."""
        assert seconds >= 0, seconds
        self.now_s += seconds
