"""What a run says of itself: a live line for people at a terminal, JSON for programs."""

from __future__ import annotations

import json
from typing import Any, Final, Protocol, TextIO

from datasvc.trainer.recipes.reporting.progress_line import ProgressLine

_CLEAR: Final = "\r\x1b[K"


class EventSink(Protocol):
    """Where events go."""

    def report(self, event: str, **facts: Any) -> None:
        """Say that something happened; `facts` are JSON values."""


class JsonEvents:
    """One JSON object a line; whole lines, so that ranks sharing a pipe do not mix theirs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def report(self, event: str, **facts: Any) -> None:
        """Write one line."""
        self._stream.write(json.dumps({"event": event, **facts}) + "\n")
        self._stream.flush()


class TerminalEvents:
    """A line that each step renews; what else happens scrolls by above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._line = ProgressLine()

    def report(self, event: str, **facts: Any) -> None:
        """Renew the line, or write one above it."""
        if event == "step":
            self._stream.write(f"{_CLEAR}{self._line.update(facts)}")
        else:
            self._stream.write(f"{_CLEAR}{_say(event, facts)}\n")
        self._stream.flush()


def choose_events(stream: TextIO) -> EventSink:
    """Return what suits the stream: a live line on a terminal, JSON lines elsewhere."""
    return TerminalEvents(stream) if stream.isatty() else JsonEvents(stream)


def _say(event: str, facts: dict[str, Any]) -> str:
    said = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in facts.items())
    return f"{event}: {', '.join(said)}"
