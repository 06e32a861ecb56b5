"""Events of a run, such as `step` and `checkpoint`: a live line on a terminal, JSON lines otherwise."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TextIO

from datasvc.printable import escape_controls, json_value

_CLEAR_LINE: Final = "\r\x1b[K"
_OLD_WEIGHT: Final = 0.9  # weight of the old mean in the new one, at each `step` event


class EventSink(Protocol):
    """A destination of events."""

    def report(self, event: str, **facts: Any) -> None:
        """Report an event; `facts` are JSON values."""


class JsonEvents:
    """Writes each event as a line of JSON, by one call of `write`: lines of ranks that share a pipe must not mix."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def report(self, event: str, **facts: Any) -> None:
        """Write one line."""
        # Not json.dumps alone: it writes NaN, which is no JSON, so that a strict reader would fail.
        self._stream.write(json.dumps(json_value({"event": event, **facts})) + "\n")
        self._stream.flush()


class TerminalEvents:
    """Shows the newest step in one line that is rewritten; other events are printed above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._line = ProgressLine()

    def report(self, event: str, **facts: Any) -> None:
        """Rewrite the line of the step, or print another event above it."""
        if event == "step":
            self._stream.write(f"{_CLEAR_LINE}{self._line.update(facts)}")
        else:
            self._stream.write(f"{_CLEAR_LINE}{_describe(event, facts)}\n")
        self._stream.flush()


class ProgressLine:
    """The text of the live line: throughput and data stall as moving averages, and the estimated time left."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began: tuple[float, float] | None = None  # time and progress of the first step
        self._step_s = self._wait_s = 0.0

    def update(self, facts: Mapping[str, Any]) -> str:
        """Return the line after a step, from the facts of its `step` event (`train.report_step`)."""
        if self._began is None:
            # Measure time and progress from the first step: a resumed run does not begin with a progress of 0.
            self._began = (self._now(), facts["progress"])
            self._step_s, self._wait_s = facts["step_s"], facts["wait_s"]
        self._step_s = _OLD_WEIGHT * self._step_s + (1 - _OLD_WEIGHT) * facts["step_s"]
        self._wait_s = _OLD_WEIGHT * self._wait_s + (1 - _OLD_WEIGHT) * facts["wait_s"]
        step_s = max(self._step_s, 1e-9)
        return "  ".join(
            [
                f"epoch {facts['epoch'] + 1}, step {facts['step']}, {facts['progress']:.0%}",
                f"{facts['samples'] / step_s:,.0f} {facts['unit']}/s",
                f"loss {facts['loss']:.4f}",
                f"rate {facts['rate']:.4g}",
                f"data stall {self._wait_s / step_s:.0%}",
                self._describe_time_left(facts["progress"]),
            ]
        )

    def _describe_time_left(self, progress: float) -> str:
        assert self._began is not None
        began, first_progress = self._began
        gained = progress - first_progress
        if gained <= 0:
            return "time left unknown"
        minutes, seconds = divmod(round((self._now() - began) / gained * (1 - progress)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"


def choose_events(stream: TextIO) -> EventSink:
    """Return the sink for a stream: a live line on a terminal, JSON lines elsewhere."""
    return TerminalEvents(stream) if stream.isatty() else JsonEvents(stream)


def _describe(event: str, facts: dict[str, Any]) -> str:
    values = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in facts.items()}
    return escape_controls(f"{event}: {', '.join(f'{name} {value}' for name, value in values.items())}")
