"""Measures where the time of a training step goes: transfer, forward, backward, all-reduce, update."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Final

import torch

# Waiting for a GPU after each part of a step lengthens this step, so only one in so many is measured.
GPU_STEPS_PER_SAMPLE: Final = 100

Mark = Callable[[str], None]
"""A function that is called with the name of a part of a step, once the part's work is submitted to the device."""


class StepParts:
    """Sums the times of the parts of steps, on one rank.

    Args:
        device: device that computes the steps. On a GPU one step in `GPU_STEPS_PER_SAMPLE` is measured, in which each
            part ends when the GPU has completed it; elsewhere every step is.
        now: monotonic clock in seconds.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._now = now
        self._last = 0.0
        self._sums_s: dict[str, float] = {}
        self._num_steps = 0

    def begin(self, step: int) -> Mark:
        """Start the step after `step` others; return the function that `update` calls at the end of each part."""
        if self._is_gpu:
            if step % GPU_STEPS_PER_SAMPLE:
                return mark_nothing
            torch.cuda.synchronize(self._device)
        self._num_steps += 1
        self._last = self._now()
        return self._mark

    def take(self) -> dict[str, float]:
        """Return the mean seconds of each part over the steps since the last call, {} if none was measured."""
        num_steps = self._num_steps
        means = {_fact_name(part): total / num_steps for part, total in self._sums_s.items()}
        self._sums_s = {}
        self._num_steps = 0
        return means

    def _mark(self, part: str) -> None:
        if self._is_gpu:
            torch.cuda.synchronize(self._device)
        now = self._now()
        self._sums_s[part] = self._sums_s.get(part, 0.0) + now - self._last
        self._last = now


@cache  # every step has the same few parts
def _fact_name(part: str) -> str:
    return f"{part.replace('-', '_')}_s"


def mark_nothing(_part: str) -> None:
    """Measure nothing."""
