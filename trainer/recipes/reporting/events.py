"""Events of a run: a live line on a terminal, JSON lines otherwise."""

from __future__ import annotations

import json
from typing import Any, Final, Protocol, TextIO

from datasvc.trainer.recipes.reporting.progress_line import ProgressLine

_CLEAR: Final = "\r\x1b[K"


class EventSink(Protocol):
    """A destination of events."""

    def report(self, event: str, **facts: Any) -> None:
        """Report an event; `facts` are JSON values."""


class JsonEvents:
    """Writes one JSON object per line, each with one write, so that lines of ranks on one pipe do not mix."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def report(self, event: str, **facts: Any) -> None:
        """Write one line."""
        self._stream.write(json.dumps({"event": event, **facts}) + "\n")
        self._stream.flush()


class TerminalEvents:
    """Shows the newest step in one line that is rewritten; other events are printed above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._line = ProgressLine()

    def report(self, event: str, **facts: Any) -> None:
        """Rewrite the line of the step, or print another event above it."""
        if event == "step":
            self._stream.write(f"{_CLEAR}{self._line.update(facts)}")
        else:
            self._stream.write(f"{_CLEAR}{_describe(event, facts)}\n")
        self._stream.flush()


def choose_events(stream: TextIO) -> EventSink:
    """Return the sink for a stream: a live line on a terminal, JSON lines elsewhere."""
    return TerminalEvents(stream) if stream.isatty() else JsonEvents(stream)


def _describe(event: str, facts: dict[str, Any]) -> str:
    values = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in facts.items()}
    return f"{event}: {', '.join(f'{name} {value}' for name, value in values.items())}"
