"""Child processes that exit with their parent, even if it is killed: worker processes and helper programs.

A worker process waits for the end of its parent. A helper program (`ChildProcess`) waits for the end of its standard
input: the kernel closes the pipe when the parent ends, however it ends.
"""

from __future__ import annotations

import os
import pickle  # only between a process and its own child
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from multiprocessing import connection, parent_process


def end_with_parent() -> None:
    """Start a thread that ends this worker process when its parent exits, even if the parent is killed."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="datasvc-parent").start()


def end_with_input() -> None:
    """Start a thread that ends this process at the end of its input, which `ChildProcess` in the parent keeps open.

    Call it after the last message was read: the thread discards all further input.
    """

    def wait() -> None:
        # Do not use `sys.stdin`: a thread that waits in it holds the buffer's lock, which Python needs at exit.
        while os.read(0, 1):
            pass
        os._exit(1)  # ends the process even if another thread hangs

    threading.Thread(target=wait, daemon=True, name="datasvc-parent").start()


def command_of(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of datasvc; run it with `environment`, so that it finds the module."""
    # -P keeps the working directory off the search path, because the directory may contain modules of the same names.
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Return the environment of this process, with its current import path as PYTHONPATH."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class ChildProcess:
    """A helper program that receives messages on its standard input, and exits at the end of this input.

    It is a new interpreter, not a fork or a multiprocessing spawn: clients of stores do not survive a fork, and a
    spawn would import the user's main module again.

    Args:
        module: module to run as `python -m MODULE`. It reads pickled messages from standard input.
        message: first message.
        answers: whether this process reads the standard output of the program.

    Raises:
        OSError: the process could not be started.
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
        """Send a message. Do nothing if either side of the pipe is closed."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError, ValueError):
            pickle.dump(message, self.process.stdin)
            self.process.stdin.flush()

    def read_line(self) -> str:
        """Return the next line of the program's output; "" at the end of the output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def close(self) -> None:
        """Terminate the program; a second call does nothing. A forked child only closes its copies of the pipes."""
        self.close_pipes()
        if self._started_by == os.getpid():
            self.process.terminate()
            self.process.wait()

    def close_pipes(self) -> None:
        """Close this process's ends of the pipes. The program exits when no process has them open."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


_running: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


def _close_inherited_pipes() -> None:
    # A forked child has copies of the pipes, which would keep the programs running after the parent exits.
    for child in list(_running):
        child.close_pipes()


os.register_at_fork(after_in_child=_close_inherited_pipes)
