"""The progress line of a run on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

_KEPT: Final = 0.9  # share of the last mean that a new step leaves


class ProgressLine:
    """Smooths rate and data stall over the steps, and estimates the time left.

    Args:
        now: monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began: tuple[float, float] | None = None  # time and progress of the first step
        self._step_s = self._wait_s = 0.0

    def update(self, facts: Mapping[str, Any]) -> str:
        """Return the line after a step.

        Args:
            facts: of a `step` event: step, epoch, progress, loss, rate, step_s, wait_s, samples, unit.
        """
        if self._began is None:
            self._began = (self._now(), facts["progress"])
            self._step_s, self._wait_s = facts["step_s"], facts["wait_s"]
        self._step_s = _KEPT * self._step_s + (1 - _KEPT) * facts["step_s"]
        self._wait_s = _KEPT * self._wait_s + (1 - _KEPT) * facts["wait_s"]
        step_s = max(self._step_s, 1e-9)
        return "  ".join(
            [
                f"epoch {facts['epoch'] + 1}, step {facts['step']}, {facts['progress']:.0%}",
                f"{facts['samples'] / step_s:,.0f} {facts['unit']}/s",
                f"loss {facts['loss']:.4f}",
                f"rate {facts['rate']:.4g}",
                f"data stall {self._wait_s / step_s:.0%}",
                self._left(facts["progress"]),
            ]
        )

    def _left(self, progress: float) -> str:
        assert self._began is not None
        began, progress_then = self._began
        done = progress - progress_then
        if done <= 0:
            return "time left unknown"
        minutes, seconds = divmod(round((self._now() - began) / done * (1 - progress)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"
