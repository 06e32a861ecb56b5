"""Forwards the output of ranks to the screen and to files, and keeps the last lines for messages about failures."""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO

_NUM_LAST_LINES = 20
_MAX_LAST_LINE_BYTES = 2000
_READ_BYTES = 1 << 16
# A longer line is forwarded in parts.
_MAX_LINE_BYTES = 1 << 16


class LinePump:
    """A thread that copies one output stream of one rank until its end.

    A line ends with a newline, or with the carriage return of a progress bar. If the screen or a file cannot be
    written, it gets no more lines, and one message is printed: a full disk must neither block nor end the rank.

    Args:
        source: read end of the stream, closed at the end.
        write_line: function that prints a line with its prefix, such as `screen_writer("stdout")`.
        files: files that get the output byte for byte; closed at the end.
        read_clock: function that returns the time to print before the prefix; None for no time.
        mark: bytes before each report of the remote guard, which goes to `on_report` and is not printed; or None.
    """

    def __init__(
        self,
        source: IO[bytes],
        write_line: Callable[[bytes], object],
        files: Sequence[IO[bytes]] = (),
        *,
        prefix: bytes,
        read_clock: Callable[[], dt.datetime] | None = None,
        mark: bytes | None = None,
        on_report: Callable[[str], None] | None = None,
    ) -> None:
        self._source = source
        self._write_line: Callable[[bytes], object] | None = write_line
        self._files = list(files)
        self._prefix = prefix
        self._read_clock = read_clock
        self._mark = mark
        self._on_report = on_report
        self._last_lines: collections.deque[bytes] = collections.deque(maxlen=_NUM_LAST_LINES)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def last_lines(self, *, timeout_s: float) -> list[str]:
        """Return the last lines. Wait up to `timeout_s` for the end of the stream, which a child may keep open."""
        self._thread.join(timeout_s)
        return [line.decode(errors="replace").rstrip("\r\n") for line in tuple(self._last_lines)]

    def _run(self) -> None:
        with self._source:
            partial_line = b""
            while data := self._source.read1(_READ_BYTES):  # type: ignore[attr-defined]  # a pipe has it
                *lines, partial_line = (partial_line + data).splitlines(keepends=True)
                # After a carriage return the line stays partial, because a newline may follow.
                if partial_line.endswith(b"\n"):
                    lines.append(partial_line)
                    partial_line = b""
                for line in lines:
                    self._handle_line(line)
                num_bytes = self._count_forwardable(partial_line)
                self._forward(partial_line[:num_bytes])
                partial_line = partial_line[num_bytes:]
            self._handle_line(partial_line)
        for file in tuple(self._files):
            self._close(file)

    def _count_forwardable(self, partial_line: bytes) -> int:
        """Return how many bytes of an incomplete line to forward now. Short lines and reports wait for their end."""
        if len(partial_line) <= _MAX_LINE_BYTES:
            return 0
        if self._mark is None:
            return len(partial_line)
        position = partial_line.find(self._mark)
        # If there is no complete mark, the last bytes may be the first part of one.
        return position if position >= 0 else len(partial_line) - len(self._mark)

    def _handle_line(self, line: bytes) -> None:
        if self._mark is not None and self._mark in line:
            # The text before the mark is output of the rank: a line that does not end with a newline.
            output, _, report = line.partition(self._mark)
            assert self._on_report is not None
            self._forward(output)
            self._on_report(report.decode(errors="replace").strip())
        else:
            self._forward(line)

    def _forward(self, line: bytes) -> None:
        if not line:
            return
        self._remember(line)
        if self._write_line is not None:
            try:
                self._write_line(self._line_prefix() + (line if line.endswith((b"\n", b"\r")) else line + b"\n"))
            except (OSError, ValueError) as error:
                self._write_line = None
                # A reader that closed the pipe (`| head`) does not need a message.
                if not isinstance(error, BrokenPipeError):
                    print_message(f"cannot print the output of a rank any more: {error}")
        for file in tuple(self._files):
            try:
                file.write(line)
                # With the flush, a reader of the file, such as `tail -f`, gets each line at once.
                file.flush()
            except OSError as error:
                self._files.remove(file)
                print_message(f"cannot write {file.name} any more: {error}")
                with contextlib.suppress(OSError):
                    file.close()

    def _line_prefix(self) -> bytes:
        """Return the prefix of a line on the screen, with the time if there is a clock."""
        if self._read_clock is None:
            return self._prefix
        return f"{self._read_clock().isoformat(' ', 'milliseconds')} ".encode() + self._prefix

    def _remember(self, line: bytes) -> None:
        if self._last_lines and self._last_lines[-1].endswith(b"\r"):
            # As on a terminal, the text after a carriage return replaces the line.
            self._last_lines.pop()
        self._last_lines.append(line[:_MAX_LAST_LINE_BYTES])

    def _close(self, file: IO[bytes]) -> None:
        try:
            file.close()
        except OSError as error:
            print_message(f"cannot write the end of {file.name}: {error}")


def screen_writer(name: str) -> Callable[[bytes], None]:
    """Return a function that prints a line on the current `stdout` or `stderr` of this process, and flushes it."""
    stream = getattr(sys, name)
    # The streams of a notebook have no binary buffer.
    is_text = not hasattr(stream, "buffer")
    target = stream if is_text else stream.buffer

    def write_line(line: bytes) -> None:
        target.write(line.decode(errors="replace") if is_text else line)
        target.flush()

    return write_line


def print_message(text: str) -> None:
    """Print a message of the launcher on standard error."""
    # Standard error itself may be closed, or may be the screen that failed.
    with contextlib.suppress(OSError, ValueError):
        print(f"datasvc-run: {text}", file=sys.stderr)  # noqa: T201 - for the user of the launcher
