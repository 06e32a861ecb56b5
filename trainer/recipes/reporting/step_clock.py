"""How long steps take, and how long of that they wait for data."""

from __future__ import annotations

import time
from collections.abc import Callable


class StepClock:
    """Sums over the steps between two reports; what happens between steps, such as a commit, is no part of them.

    Args:
        now: seconds from any origin.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._took_s = self._waited_s = 0.0
        self._num_steps = 0
        self.restart()

    def restart(self) -> None:
        """The next step begins now."""
        self._began = self._got = self._now()

    def got_batch(self) -> None:
        """The data of this step is there."""
        self._got = self._now()

    def ended_step(self) -> None:
        """This step is done, and the next begins."""
        ended = self._now()
        self._took_s += ended - self._began
        self._waited_s += self._got - self._began
        self._num_steps += 1
        self._began = ended

    def take(self) -> tuple[float, float]:
        """Return the mean seconds of a step, and those that it waited for data, since the last call."""
        num_steps = max(self._num_steps, 1)
        means = self._took_s / num_steps, self._waited_s / num_steps
        self._took_s = self._waited_s = 0.0
        self._num_steps = 0
        return means
