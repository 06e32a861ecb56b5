"""Ends the process groups of a launcher that is gone. Standard library only: both ends of one pipe.

The launcher holds the only write end of the guard's standard input, so whatever ends the launcher, SIGKILL
included, closes the pipe. Lines ``+PID`` and ``-PID`` add and remove a process group. At the end of input the
groups that are left are killed. It works for any command, with its children, and without code that runs
between fork and exec. Not covered: a launcher killed in the microseconds between the start of a rank and its
``+PID``, and ranks that move to a session of their own.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading


class OrphanGuard:
    """The launcher's end: starts the guard, tells it which groups are alive. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(  # noqa: S603 - our own file
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """This process group must not outlive the launcher."""
        self._tell(f"+{group}")

    def remove(self, group: int) -> None:
        """This process group has ended; its number may be another's soon."""
        self._tell(f"-{group}")

    def close(self) -> None:
        """Ends the guard, which kills the groups that were not removed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(f"{line}\n")


def main() -> None:
    """Reads lines until the launcher is gone, then kills what is left."""
    # Signals for the launcher's terminal are the launcher's business.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line.startswith("+") else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
