"""Passes the output of ranks through, line by line, and remembers how it ended."""

import collections
import contextlib
import threading
from collections.abc import Sequence
from typing import IO

_NUM_LAST_LINES = 20


class LinePump:
    """Copies one stream of one rank until its end, from a thread of its own.

    Args:
        source: the read end, closed at the end.
        targets: each gets every line at once, the first with the prefix.
        prefix: put before each line of the first target.
    """

    def __init__(self, source: IO[bytes], targets: Sequence[IO[bytes]], *, prefix: bytes) -> None:
        self._source = source
        self._targets = targets
        self._prefix = prefix
        self._last_lines: collections.deque[bytes] = collections.deque(maxlen=_NUM_LAST_LINES)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def last_lines(self, *, timeout_s: float) -> list[str]:
        """The last lines, once the stream ends or time is up (a child of the rank may keep it open)."""
        self._thread.join(timeout_s)
        return [line.decode(errors="replace").rstrip("\n") for line in tuple(self._last_lines)]

    def _run(self) -> None:
        with self._source:
            for line in self._source:
                self._last_lines.append(line)
                for index, target in enumerate(self._targets):
                    # A reader that went away (`| head`) must not block the rank on a full pipe.
                    with contextlib.suppress(BrokenPipeError):
                        target.write((self._prefix if index == 0 else b"") + _ended(line))
                        target.flush()


def _ended(line: bytes) -> bytes:
    return line if line.endswith(b"\n") else line + b"\n"
