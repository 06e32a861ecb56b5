"""A guard process that kills the process groups of a launcher that has died. Uses the standard library only.

Any end of the launcher, SIGKILL included, closes the pipe to the standard input of the guard. If a forked child of
the launcher keeps the pipe open, the guard detects that its own parent process has changed. Lines `+PID` and `-PID`
add and remove a process group, `quit` ends the guard. At its end, the guard kills the remaining groups. This works
for any command and its children, and needs no code between fork and exec. The guard does not cover a launcher that is
killed in the microseconds between the start of a rank and its `+PID`, nor ranks that create a session of their own.
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

# How long the ranks may outlive the launcher if a forked child keeps its pipe open.
_POLL_PERIOD_S = 1.0
# A guard that has not ended this long after `quit` is killed.
_QUIT_TIMEOUT_S = 10.0


class OrphanGuard:
    """The launcher's side of the guard: starts the process and registers process groups. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(  # noqa: S603 - our own file
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            bufsize=0,
            # Signals of the launcher's terminal must not reach the guard.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        release_in_forked_children(self._pipe)

    def add(self, group: int) -> None:
        """Register a process group that must not outlive the launcher.

        Raises:
            ChildProcessError: the guard process has exited.
        """
        try:
            self._send(f"+{group}")
        except BrokenPipeError:
            raise ChildProcessError(
                "the guard process that ends the ranks if the launcher is killed has exited; start the job again"
            ) from None

    def remove(self, group: int) -> None:
        """Unregister a group that has ended, because its number may be reused; ignore a guard that has exited."""
        with contextlib.suppress(BrokenPipeError):
            self._send(f"-{group}")

    def close(self) -> None:
        """End the guard, which kills the groups that were not removed."""
        with contextlib.suppress(BrokenPipeError):
            self._send("quit")
        self._pipe.close()
        try:
            self._process.wait(_QUIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, line: str) -> None:
        with self._lock:
            self._pipe.write(f"{line}\n".encode())


def release_in_forked_children(pipe: IO[bytes]) -> None:
    """Release the write end of a pipe in processes that are forked from this one without exec.

    Otherwise such a process would keep the pipe open after the death of the launcher, and the reader would wait.
    """
    _pipes.add(pipe)


_pipes: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def _release_pipes() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    for pipe in list(_pipes):
        # Not `pipe.close`, which would hang if another thread held the pipe's lock at the fork. `fileno` of a pipe
        # that is closed already raises ValueError.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(null, pipe.fileno(), inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_release_pipes)


def main() -> None:
    """Read lines until the launcher has ended, then kill the remaining process groups."""
    # The launcher handles these signals; the guard must live until the launcher ends.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    groups: set[int] = set()
    for line in listen(int(sys.argv[1])):
        if line == b"quit":
            break
        group = int(line[1:])
        if line.startswith(b"+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def listen(launcher: int) -> Iterator[bytes]:
    """Yield the lines of standard input until its end, or until the launcher has died and no line is left."""
    fd = sys.stdin.fileno()
    partial_line = b""
    while True:
        if select.select([fd], [], [], _POLL_PERIOD_S)[0]:  # noqa: TID251 - standard input
            data = os.read(fd, 1 << 16)
            if not data:
                return
            *lines, partial_line = (partial_line + data).split(b"\n")
            yield from lines
        elif os.getppid() != launcher:
            return


if __name__ == "__main__":
    main()
