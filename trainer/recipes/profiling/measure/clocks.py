"""Moments in the life of a device: of a GPU by events in its stream, so that measuring waits for nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes stamps now, and says later when they were."""

    def stamp(self) -> Any:
        """Return a stamp of the moment at which the work launched so far is done."""

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """Return the seconds of each stamp since the first; waits for the device."""


class HostClock:
    """The CPU does its work when it is told to."""

    def stamp(self) -> Any:
        """See `Clock`."""
        return time.perf_counter()

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """See `Clock`."""
        return [stamp - stamps[0] for stamp in stamps]


class DeviceClock:
    """A GPU does its work after it was told to, in order."""

    def stamp(self) -> Any:
        """See `Clock`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here
        event.record()
        return event

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """See `Clock`."""
        stamps[-1].synchronize()
        return [stamps[0].elapsed_time(stamp) * 1e-3 for stamp in stamps]


def choose_clock(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return DeviceClock() if device.type == "cuda" else HostClock()
