"""Which hosts get no new ranks because ranks have failed on them: pure, the clock is passed in."""

from __future__ import annotations

import math


class Blacklist:
    """Bars a host when a rank fails on it: for ever, or for a time that doubles with each failure.

    Args:
        cooldown_range_s: least and greatest time for which a host is barred; None for ever.

    Raises:
        ValueError: the range is negative or upside down.
    """

    def __init__(self, cooldown_range_s: tuple[float, float] | None = None) -> None:
        if cooldown_range_s is not None and not 0 <= cooldown_range_s[0] <= cooldown_range_s[1]:
            raise ValueError(f"a cooldown range is two times in order, not {cooldown_range_s}")
        self._range_s = cooldown_range_s
        self._num_failures: dict[str, int] = {}
        self._barred_until_s: dict[str, float] = {}

    def bar(self, host: str, now_s: float) -> float:
        """Takes note of a failure; one while the host is barred, of ranks that die together, is the same one.

        Returns:
            When the host may be used again, infinity for never.
        """
        if not self.bars(host, now_s):
            count = self._num_failures[host] = self._num_failures.get(host, 0) + 1
            self._barred_until_s[host] = now_s + self._cooldown_s(count)
        return self._barred_until_s[host]

    def bars(self, host: str, now_s: float) -> bool:
        """Whether the host gets no ranks now."""
        return now_s < self._barred_until_s.get(host, -math.inf)

    def next_release_s(self, now_s: float) -> float | None:
        """When the next host may be used again; None if none will."""
        times = [until for until in self._barred_until_s.values() if now_s < until < math.inf]
        return min(times, default=None)

    def _cooldown_s(self, num_failures: int) -> float:
        if self._range_s is None:
            return math.inf
        least, greatest = self._range_s
        return min(greatest, least * 2.0 ** min(num_failures - 1, 60))
