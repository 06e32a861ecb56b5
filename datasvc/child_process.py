"""Child processes that exit when their parent ends, even if it is killed: worker processes and helper programs.

A worker process is a process of `multiprocessing`: it watches its parent (`end_with_parent`). A helper program is a
`ChildProcess`: it watches its standard input (`end_with_input`), a pipe that the kernel closes when the parent ends.
"""

from __future__ import annotations

import hashlib
import os
import pickle  # only between a process and its own child
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from multiprocessing import connection, current_process, parent_process

KEY_VARIABLE = "DATASVC_CHILD_KEY"


def end_with_parent() -> None:
    """Start a thread that ends this worker process when its parent ends, even if the parent is killed."""
    parent = parent_process()
    assert parent is not None, "only a process of multiprocessing calls this"

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)  # ends the process even if another thread hangs

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
    """Return the command that runs a module of datasvc. Run it with `environment()`, so that it finds datasvc."""
    # -P keeps the working directory off the search path, because the directory may contain modules of the same names.
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Return the environment of this process, with its current import path as PYTHONPATH, and `KEY_VARIABLE`."""
    # Leave out "", which is the working directory; see `command_of`.
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "PYTHONPATH": paths, KEY_VARIABLE: inherited_key().hex()}


def inherited_key() -> bytes:
    """Return the key that this process shares with its child processes, and with no other, see `url_to_pickle`."""
    # A worker process inherits the key of multiprocessing, and a helper program gets it in its environment.
    given = os.environ.get(KEY_VARIABLE)
    return bytes.fromhex(given) if given else hashlib.sha256(current_process().authkey).digest()


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
        _started.add(self)
        self.send(message)

    def send(self, message: object) -> None:
        """Send a message. Do nothing if the program has exited, or `close` was called.

        No error is raised, because a caller can go on without its helper. A caller that reads answers finds the end
        of the output.
        """
        assert self.process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # ValueError: the file is closed in this process
            pickle.dump(message, self.process.stdin)
            self.process.stdin.flush()

    def read_line(self) -> str:
        """Return the next line of the program's output; "" at the end of the output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def close(self) -> None:
        """Terminate the program and wait until it has exited; a second call does nothing.

        In a forked child, only close its copies of the pipes: the program belongs to the parent.
        """
        self.close_pipes()
        if self._started_by == os.getpid():
            self.process.terminate()
            self.process.wait()

    def close_pipes(self) -> None:
        """Close this process's ends of the pipes. The program exits when no process has them open."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # `close` flushes, and the program may have exited
                    pipe.close()


_started: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


def _close_inherited_pipes() -> None:
    # A forked child has copies of the pipes, which would keep the programs running after the parent exits.
    for child in list(_started):
        child.close_pipes()


os.register_at_fork(after_in_child=_close_inherited_pipes)
