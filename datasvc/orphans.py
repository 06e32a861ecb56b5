"""Processes that end with whoever started them, however that died: workers, and programs of ours beside a process."""

from __future__ import annotations

import os
import pickle  # between a process and its own child
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from multiprocessing import connection, parent_process


def end_with_parent() -> None:
    """Let this worker process end when its parent is gone: nobody else would tell it, and nobody waits for it."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="datasvc-parent").start()


def command_of(module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules; with `environment` it finds what this process finds.

    Nothing else that lies in the working directory, which may be anybody's, is imported.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Return this process's environment with its search path, as it is now."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class ChildProcess:
    """A program of ours beside this process, told what to do over its standard input: it ends with that.

    A program of its own, not a forked or spawned copy: no client survives a fork, and nobody's main module is run
    again.

    Args:
        module: run as `python -m MODULE`. It reads pickled messages, and ends itself where these end.
        message: the first one.
        answers: whether this process reads what it writes.

    Raises:
        OSError: no process could be made.
    """

    def __init__(self, module: str, message: object, *, answers: bool = False) -> None:
        self.process = subprocess.Popen(  # noqa: S603 - one of our own modules
            command_of(module),
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if answers else subprocess.DEVNULL,
        )
        self._started_by = os.getpid()
        _running.add(self)
        self.send(message)

    def send(self, message: object) -> None:
        """Send one more message. Does nothing once either side is closed."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError, ValueError):
            pickle.dump(message, self.process.stdin)
            self.process.stdin.flush()

    def read_line(self) -> str:
        """Return the next line that it writes; "" when there is none any more."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def close(self) -> None:
        """End the program. Closing again does nothing, nor does a forked child."""
        self.let_go()
        if self._started_by == os.getpid():
            self.process.terminate()
            self.process.wait()

    def let_go(self) -> None:
        """Close this process's ends of the pipes: the program ends when nobody has them open any more."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


_running: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


def _let_go_of_all() -> None:
    """In a forked child: its copies of the pipes would keep the programs running after the parent's end."""
    for companion in list(_running):
        companion.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)
