"""Blacklist of hosts on which workers have failed, for `membership`. It reads no clock; callers pass the time."""

from __future__ import annotations

import math


class Blacklist:
    """Hosts that get no new workers after a failure, permanently or for a time that doubles with each failure.

    Args:
        cooldown_range_s: time for which the first failure blocks a host, and its maximum; None to block permanently.

    Raises:
        ValueError: the minimum is negative or larger than the maximum.
    """

    def __init__(self, cooldown_range_s: tuple[float, float] | None = None) -> None:
        if cooldown_range_s is not None and not 0 <= cooldown_range_s[0] <= cooldown_range_s[1]:
            raise ValueError(f"the cooldown range must be 0 <= minimum <= maximum, not {cooldown_range_s}")
        self._range_s = cooldown_range_s
        self._num_failures: dict[str, int] = {}
        self._blocked_until_s: dict[str, float] = {}

    def block(self, host: str, now_s: float) -> float:
        """Record a failure on a host.

        Returns:
            Time from which the host may get new workers again; infinity if it never may.
        """
        # Workers that fail together count as one failure: further failures on a blocked host are not counted.
        if not self.is_blocked(host, now_s):
            count = self._num_failures[host] = self._num_failures.get(host, 0) + 1
            self._blocked_until_s[host] = now_s + self._cooldown_s(count)
        return self._blocked_until_s[host]

    def is_blocked(self, host: str, now_s: float) -> bool:
        """Return whether the host gets no new workers at `now_s`."""
        return now_s < self._blocked_until_s.get(host, -math.inf)

    def next_release_s(self, now_s: float) -> float | None:
        """Return the next time when a blocked host may get workers again; None if no blocked host ever may."""
        times = [until for until in self._blocked_until_s.values() if now_s < until < math.inf]
        return min(times, default=None)

    def _cooldown_s(self, num_failures: int) -> float:
        if self._range_s is None:
            return math.inf
        minimum_s, maximum_s = self._range_s
        # The exponent is limited, because a float overflows with an error.
        return min(maximum_s, minimum_s * 2.0 ** min(num_failures - 1, 60))
