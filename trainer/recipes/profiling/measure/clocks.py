"""Clocks of devices: for a GPU, events in its stream, so that measuring does not block the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes time stamps, and converts them to seconds later."""

    def stamp(self) -> Any:
        """Return a stamp of the time at which all work launched so far has completed."""

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """Return the seconds from the first stamp to each; waits for the device."""


class HostClock:
    """The clock of the CPU, where work completes before the call returns."""

    def stamp(self) -> Any:
        """See `Clock`."""
        return time.perf_counter()

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """See `Clock`."""
        return [stamp - stamps[0] for stamp in stamps]


class DeviceClock:
    """The clock of a GPU, which runs launched work later, in order."""

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
