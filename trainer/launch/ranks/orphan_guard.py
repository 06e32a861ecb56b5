"""Ends the process groups of a launcher that is gone. Standard library only: both ends of one pipe.

Whatever ends the launcher, SIGKILL included, closes the pipe to the guard's standard input; should a process that
the launcher has forked keep it open, the guard sees that it has another parent. Lines `+PID` and `-PID` add and
remove a process group, `quit` ends the guard. The groups that are left at its end are killed. It works for any
command, with its children, and without code that runs between fork and exec. Not covered: a launcher killed in the
microseconds between the start of a rank and its `+PID`, and ranks that move to a session of their own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import IO

_LOOK_PERIOD_S = 1.0
_QUIT_TIMEOUT_S = 10.0


class OrphanGuard:
    """The launcher's end: starts the guard, tells it which groups are alive. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(  # noqa: S603 - our own file
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        keep_from_forked_children(self._pipe)

    def add(self, group: int) -> None:
        """This process group must not outlive the launcher.

        Raises:
            ChildProcessError: the guard is gone.
        """
        try:
            self._tell(f"+{group}")
        except BrokenPipeError:
            raise ChildProcessError("the process that ends ranks if the launcher is killed is gone itself") from None

    def remove(self, group: int) -> None:
        """This process group has ended; its number may be another's soon. Nothing to say to a guard that is gone."""
        with contextlib.suppress(BrokenPipeError):
            self._tell(f"-{group}")

    def close(self) -> None:
        """Ends the guard, which kills the groups that were not removed."""
        with contextlib.suppress(BrokenPipeError):
            self._tell("quit")
        self._pipe.close()
        try:
            self._process.wait(_QUIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        with self._lock:
            self._pipe.write(f"{line}\n".encode())


def keep_from_forked_children(pipe: IO[bytes]) -> None:
    """Lets a process that is forked from this one, without exec, not hold the write end of a pipe open."""
    _pipes.add(pipe)


_pipes: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def _let_go_of_pipes() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    for pipe in list(_pipes):
        # Not `pipe.close`, whose lock another thread may have held at the fork.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(null, pipe.fileno(), inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_let_go_of_pipes)


def main() -> None:
    """Reads lines until the launcher is gone, then kills what is left."""
    # Signals for the launcher's terminal are the launcher's business.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups: set[int] = set()
    for line in listen(int(sys.argv[1])):
        if line == b"quit":
            break
        (groups.add if line.startswith(b"+") else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def listen(launcher: int) -> Iterator[bytes]:
    """The lines of standard input until its end, or until the launcher is gone and has left no more of them."""
    fd = sys.stdin.fileno()
    rest = b""
    while True:
        if select.select([fd], [], [], _LOOK_PERIOD_S)[0]:
            piece = os.read(fd, 1 << 16)
            if not piece:
                return
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines
        elif os.getppid() != launcher:
            return


if __name__ == "__main__":
    main()
