"""Passes the output of ranks through, line by line, and remembers how it ended."""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, Protocol

_NUM_LAST_LINES = 20
_MAX_LAST_LINE_BYTES = 2000
_READ_BYTES = 1 << 16
# A longer line is passed on in pieces.
_MAX_LINE_BYTES = 1 << 16


class LineTarget(Protocol):
    """Where lines go: a binary file, or a stand-in for one."""

    def write(self, line: bytes, /) -> object:
        """Takes one line."""

    def flush(self) -> object:
        """Passes on what it took."""


class LinePump:
    """Copies one stream of one rank until its end, from a thread of its own.

    A line ends with a newline, or with the carriage return of a progress bar. A target that cannot be written is
    given up, which is said once: the rank must neither wait nor end for it.

    Args:
        source: the read end, closed at the end.
        screen: gets every line at once, with the prefix.
        files: get what the rank writes, byte for byte; closed at the end.
        prefix: put before each line on the screen.
        read_clock: gives the time that is put before the prefix; None for no time.
        mark: what follows it in a line is a report of the remote guard, not output; None without such a guard.
        on_report: called with each report, from the pump's thread.
    """

    def __init__(
        self,
        source: IO[bytes],
        screen: LineTarget,
        files: Sequence[IO[bytes]] = (),
        *,
        prefix: bytes,
        read_clock: Callable[[], dt.datetime] | None = None,
        mark: bytes | None = None,
        on_report: Callable[[str], None] | None = None,
    ) -> None:
        self._source = source
        self._screen: LineTarget | None = screen
        self._files = list(files)
        self._prefix = prefix
        self._read_clock = read_clock
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
            rest = b""
            while piece := self._source.read1(_READ_BYTES):  # type: ignore[attr-defined]  # a pipe has it
                *lines, rest = (rest + piece).splitlines(keepends=True)
                if rest.endswith(b"\n"):
                    lines.append(rest)
                    rest = b""
                for line in lines:
                    self._take(line)
                cut = self._choose_cut(rest)
                self._pass_on(rest[:cut])
                rest = rest[cut:]
            self._take(rest)
        for file in tuple(self._files):
            self._close(file)

    def _choose_cut(self, rest: bytes) -> int:
        """How many bytes of a line without an end so far are passed on, never a part of a report among them."""
        if len(rest) <= _MAX_LINE_BYTES:
            return 0
        if self._mark is None:
            return len(rest)
        position = rest.find(self._mark)
        return position if position >= 0 else len(rest) - len(self._mark)

    def _take(self, line: bytes) -> None:
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
        self._remember(line)
        if self._screen is not None:
            try:
                _write(self._screen, self._begin() + (line if line.endswith((b"\n", b"\r")) else line + b"\n"))
            except (OSError, ValueError) as error:
                self._screen = None
                # A reader that went away (`| head`) wants no more.
                if not isinstance(error, BrokenPipeError):
                    _say(f"cannot print the output of a rank any more: {error}")
        for file in tuple(self._files):
            try:
                _write(file, line)
            except OSError as error:
                self._files.remove(file)
                _say(f"cannot write {file.name} any more: {error}")
                with contextlib.suppress(OSError):
                    file.close()

    def _begin(self) -> bytes:
        """What a line on the screen begins with."""
        if self._read_clock is None:
            return self._prefix
        return f"{self._read_clock().isoformat(' ', 'milliseconds')} ".encode() + self._prefix

    def _remember(self, line: bytes) -> None:
        if self._last_lines and self._last_lines[-1].endswith(b"\r"):
            # As on a terminal, what follows a carriage return replaces the line.
            self._last_lines.pop()
        self._last_lines.append(line[:_MAX_LAST_LINE_BYTES])

    def _close(self, file: IO[bytes]) -> None:
        try:
            file.close()
        except OSError as error:
            _say(f"cannot write the end of {file.name}: {error}")


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
    """This process's `stdout` or `stderr` as it is now."""
    stream: IO[str] = getattr(sys, name)
    return getattr(stream, "buffer", None) or TextTarget(stream)


def _write(target: LineTarget, line: bytes) -> None:
    target.write(line)
    target.flush()


def _say(text: str) -> None:
    # It may be the screen itself that is gone.
    with contextlib.suppress(OSError, ValueError):
        print(f"datasvc.trainer.launch: {text}", file=sys.stderr)  # noqa: T201 - for whoever started the job
