"""How fast bytes may pass: a pure law of rates, given the time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# What a late timer may make up for. It bounds the burst too: a rate holds over any stretch but for this much of it.
_CREDIT_S: Final = 0.02
_SMALLEST_STEP_BYTES: Final = 4 << 10
_LARGEST_STEP_BYTES: Final = 256 << 10
_STEPS_PER_S: Final = 100


@dataclass(frozen=True)
class Limits:
    """How an origin answers; the defaults let everything pass at once.

    Attributes:
        connection_rate: bytes per second of one connection, in each direction; None for no limit.
        total_rate: bytes per second of all connections together; None for no limit.
        latency_s: from the end of a request to the first byte of its answer, at least.
    """

    connection_rate: float | None = None
    total_rate: float | None = None
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        rates = [rate for rate in (self.connection_rate, self.total_rate) if rate is not None]
        if not all(rate > 0 for rate in rates) or self.latency_s < 0:
            raise ValueError(f"rates are positive and a latency is not negative, not {self}")


class Pacer:
    """When bytes may leave that share one rate: at most `rate * (t + 0.02)` bytes in any `t` seconds.

    Args:
        rate: bytes per second; None for no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._free_at = float("-inf")

    def begin(self, now: float) -> None:
        """Say that a new stretch of bytes starts, with no credit from before it."""
        self._free_at = max(self._free_at, now)

    def reserve(self, num_bytes: int, now: float) -> float:
        """Return when these bytes will have passed, in seconds of the clock that tells `now`; in order of calls."""
        if self.rate is None:
            return now
        self._free_at = max(self._free_at, now - _CREDIT_S) + num_bytes / self.rate
        return self._free_at


def choose_step_bytes(*rates: float | None) -> int:
    """Return how many bytes to move at once so that the slowest of `rates` is smooth and a fast one costs little."""
    slowest = min((rate for rate in rates if rate is not None), default=float("inf"))
    return int(min(max(slowest / _STEPS_PER_S, _SMALLEST_STEP_BYTES), _LARGEST_STEP_BYTES))
