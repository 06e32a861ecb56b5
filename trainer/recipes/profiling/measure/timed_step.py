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
    """Measures the parts of one step. The first part starts at construction.

    A part lasts until the device has completed its work. A part that is marked several times is summed.

    Attributes:
        table: `float64[part, kind of time]`. Parts are in the order of `PARTS`. The kinds of time are WALL: seconds;
            OWN: processor time of the training thread, without waiting for the device; BESIDE: processor time of all
            other threads of the process.
        spans: the marked parts in order, one for each mark.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.table: npt.NDArray[np.float64] = np.zeros((len(PARTS), 3))
        self.spans: list[TimeSpan] = []
        self._last = self._now()

    def mark(self, part: str) -> None:
        """Mark the end of `part` and the start of the next part."""
        # Read before waiting for the device, because CUDA uses processor time while it waits.
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
        """Return the seconds of the wall clock, and the processor time of this thread and of the whole process."""
        return np.array([time.perf_counter(), time.thread_time(), time.process_time()])
