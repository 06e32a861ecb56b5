"""Measures the duration of steps, and the part of it that is spent waiting for data."""

from __future__ import annotations

import time
from collections.abc import Callable


class StepClock:
    """Sums durations over the steps between two reports. Work between steps, such as a commit, does not count."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._took_s = self._waited_s = 0.0
        self._num_steps = 0
        self.restart()

    def restart(self) -> None:
        """Mark the start of the next step."""
        self._began = self._got = self._now()

    def got_batch(self) -> None:
        """Mark that the batch of this step has arrived."""
        self._got = self._now()

    def ended_step(self) -> None:
        """Mark the end of this step and the start of the next."""
        ended = self._now()
        self._took_s += ended - self._began
        self._waited_s += self._got - self._began
        self._num_steps += 1
        self._began = ended

    def take(self) -> tuple[float, float]:
        """Return the mean duration of the steps since the last call, and their mean wait for data, in seconds."""
        num_steps = max(self._num_steps, 1)  # a call before the first step returns zeros
        means = self._took_s / num_steps, self._waited_s / num_steps
        self._took_s = self._waited_s = 0.0
        self._num_steps = 0
        return means
