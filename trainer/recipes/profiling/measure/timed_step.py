"""Times the parts of one step: wall-clock seconds, and processor time of the training thread and of all others."""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from datasvc.loaders.profiling.step_times import TimeSpan
from datasvc.trainer.recipes.profiling.measure.layer_times import synchronize

PARTS: Final = ("io", "transfer", "targets", "forward", "backward", "all-reduce", "update")
WALL, OWN, BESIDE = range(3)  # the columns of `StepPartTimer.table`
_THREAD: Final = 1  # the row of the training thread in a trace


class StepPartTimer:
    """Measures the parts of a step, each until the device has completed it. The first part starts at construction.

    Attributes:
        table: `float64[part, 3]`: seconds of each part, processor time of this thread without waiting for the device,
            and processor time of all other threads.
        spans: the marked parts in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.table: npt.NDArray[np.float64] = np.zeros((len(PARTS), 3))
        self.spans: list[TimeSpan] = []
        self._last = self._now()

    def mark(self, part: str) -> None:
        """Mark the end of a part and the start of the next one."""
        # Read before waiting for the device: CUDA spins while it waits, which is not work.
        worked_until_s = time.thread_time()
        synchronize(self._device)
        now = self._now()
        passed_s, own_s, all_s = now - self._last
        worked_s = worked_until_s - self._last[1]
        self.table[PARTS.index(part)] += (passed_s, worked_s, max(0.0, all_s - own_s))
        self.spans.append(TimeSpan(part, _THREAD, "step", round(self._last[0] * 1e9), round(passed_s * 1e9), 1))
        self._last = now

    @staticmethod
    def _now() -> npt.NDArray[Any]:
        return np.array([time.perf_counter(), time.thread_time(), time.process_time()])
