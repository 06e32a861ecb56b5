"""The parts of one step as they passed: seconds, and the processor time of the training thread and of all others."""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from loaders.step_times import Span
from trainer.recipes.profiling.layer_times import synchronize

PARTS: Final = ("io", "transfer", "forward", "backward", "all-reduce", "update")
WALL, OWN, BESIDE = range(3)
_THREAD: Final = 1


class StepTimer:
    """Takes the time at the end of each part, when the device is done with it; begins with the first part.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._table = np.zeros((len(PARTS), 3))
        self.spans: list[Span] = []
        self._last = self._now()

    @property
    def table(self) -> npt.NDArray[np.float64]:
        """`float64[part, 3]`: seconds of each part; of these, processor time of this thread; and of all others."""
        return self._table

    def mark(self, part: str) -> None:
        """The part has ended, and the next one begins."""
        synchronize(self._device)
        now = self._now()
        passed_s, own_s, all_s = now - self._last
        self._table[PARTS.index(part)] += (passed_s, own_s, max(0.0, all_s - own_s))
        self.spans.append(Span(part, _THREAD, "step", round(self._last[0] * 1e9), round(passed_s * 1e9), 1))
        self._last = now

    @staticmethod
    def _now() -> npt.NDArray[Any]:
        return np.array([time.perf_counter(), time.thread_time(), time.process_time()])
