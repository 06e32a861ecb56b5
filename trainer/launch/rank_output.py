"""Passes the output of ranks through, line by line, and remembers how it ended."""

import collections
import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, Protocol

_NUM_LAST_LINES = 20


class LineTarget(Protocol):
    """Where lines go: a binary file, or a stand-in for one."""

    def write(self, line: bytes, /) -> object:
        """Takes one line."""

    def flush(self) -> object:
        """Passes on what it took."""


class LinePump:
    """Copies one stream of one rank until its end, from a thread of its own.

    Args:
        source: the read end, closed at the end.
        targets: each gets every line at once, the first with the prefix.
        prefix: put before each line of the first target.
        mark: what follows it in a line is a report of the remote guard, not output; None without such a guard.
        on_report: called with each report, from the pump's thread.
    """

    def __init__(
        self,
        source: IO[bytes],
        targets: Sequence[LineTarget],
        *,
        prefix: bytes,
        mark: bytes | None = None,
        on_report: Callable[[str], None] | None = None,
    ) -> None:
        self._source = source
        self._targets = targets
        self._prefix = prefix
        self._mark = mark
        self._on_report = on_report
        self._last_lines: collections.deque[bytes] = collections.deque(maxlen=_NUM_LAST_LINES)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def last_lines(self, *, timeout_s: float) -> list[str]:
        """The last lines, once the stream ends or time is up (a child of the rank may keep it open)."""
        self._thread.join(timeout_s)
        return [line.decode(errors="replace").rstrip("\r\n") for line in tuple(self._last_lines)]

    def _run(self) -> None:
        with self._source:
            for line in self._source:
                if self._mark is not None and self._mark in line:
                    # The guard's report may follow a last line that the rank did not end.
                    output, _, report = line.partition(self._mark)
                    assert self._on_report is not None
                    self._pass_on(output)
                    self._on_report(report.decode(errors="replace").strip())
                else:
                    self._pass_on(line)

    def _pass_on(self, line: bytes) -> None:
        if not line:
            return
        self._last_lines.append(line)
        for index, target in enumerate(self._targets):
            # A reader that went away (`| head`) must not block the rank on a full pipe.
            with contextlib.suppress(BrokenPipeError):
                target.write((self._prefix if index == 0 else b"") + _ended(line))
                target.flush()


class TextTarget:
    """Makes a stream of text that has no bytes below it, as in a notebook, a target."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, line: bytes, /) -> None:
        """Takes one line."""
        self._stream.write(line.decode(errors="replace"))

    def flush(self) -> None:
        """Passes on what it took."""
        self._stream.flush()


def screen(name: str) -> LineTarget:
    """This process's ``stdout`` or ``stderr`` as it is now."""
    stream: IO[str] = getattr(sys, name)
    return getattr(stream, "buffer", None) or TextTarget(stream)


def _ended(line: bytes) -> bytes:
    return line if line.endswith(b"\n") else line + b"\n"
