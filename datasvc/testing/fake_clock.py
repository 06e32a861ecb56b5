"""A clock for tests, which advances only on request."""

from __future__ import annotations


class FakeClock:
    """A clock at the time `now_s`, in seconds; pass it as an argument `clock`, in place of `time.monotonic`."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Return the current time in seconds."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Add to the time; `seconds` is not negative."""
        assert seconds >= 0, seconds
        self.now_s += seconds
