"""Starts Python programs of tests by a fork of a process that has imported torch, pyarrow and this package.

An import of torch takes more than two seconds of processor time: most of the time of a test with ranks was imports.
`command()` takes the place of `sys.executable`: it starts the server at its first call, and returns the path of a
client, which passes its arguments, environment, folder and open files to the server, forwards signals, and ends
as the program ends. If the client is killed, the server kills the program with its process group, so launchers may
treat the client as the program. `os.getppid` gives the parent of the client.

An interpreter of its own is started for options other than `-c` and `-m`, with LD_PRELOAD, and for a client in
another namespace or of another user than the server.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
NAMESPACES = ("/proc/self/ns/net", "/proc/self/ns/mnt", "/proc/self/ns/pid")
PRELOADED = (
    "torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "numpy", "pyarrow.compute", "pyarrow.ipc",
    "datasvc", "datasvc.models", "datasvc.loaders", "datasvc.trainer", "datasvc.trainer.recipes.train",
)  # fmt: skip
_PR_SET_PDEATHSIG = 1


@functools.cache
def command() -> str:
    """Return the path of the client; the server ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="warm-python-"))
    listener = socket.socket(socket.AF_UNIX)
    # Bound here: a client may connect before the server has imported anything.
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "tests.support.warm_python", str(listener.fileno())]
    server = subprocess.Popen(words, env=environ, cwd=ROOT, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    listener.close()
    client = Path(__file__).with_name("warm_client.py").read_text()
    values = (str(folder / "socket"), sys.executable, (os.getuid(), *map(os.readlink, NAMESPACES)))
    head = f"#!{os.path.realpath(sys.executable)} -IS\nPATH, REAL, PLACE = {values!r}\n"
    (folder / "python").write_text(head + client)
    (folder / "python").chmod(0o755)

    @atexit.register
    def end() -> None:
        server.stdin.close()
        server.wait(30)
        shutil.rmtree(folder, ignore_errors=True)

    return str(folder / "python")


@contextlib.contextmanager
def workers() -> Iterator[None]:
    """Start the processes that `multiprocessing` spawns here by `command()`."""
    multiprocessing.resource_tracker.ensure_running()  # by the real interpreter: it outlives the server
    real = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(command())
    try:
        yield
    finally:
        multiprocessing.set_executable(real)


class _Server:
    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._pids = {}  # connection -> pid
        self._connections = {}  # pid -> connection

    def serve(self) -> dict | None:
        """Fork for each client; return its request in the child, None in the server when its parent has ended."""
        reads, writes = os.pipe()
        for end in (reads, writes):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.collect()
        gc.freeze()  # pages of imported modules stay shared
        while True:
            ready = wait([0, reads, self._listener, *self._pids])
            if 0 in ready:
                self._end_all()
                return None
            if reads in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(reads, 4096)
                self._reap()
            for connection in [one for one in ready if one in self._pids]:
                self._hear(connection)
            if self._listener in ready and (request := self._start()):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (reads, writes):
                    os.close(end)
                _place(request.pop("received"), request["fds"])
                return request

    def _start(self) -> dict | None:
        connection, _ = self._listener.accept()
        try:
            data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 250)
            size, rest = data.split(b"\n", 1)
            while len(rest) < int(size) and (more := connection.recv(1 << 20)):
                rest += more
            request = json.loads(rest)
        except (ValueError, OSError):  # of a client that was killed
            connection.close()
            return None
        if pid := os.fork():
            for fd in fds:
                os.close(fd)
            self._pids[connection], self._connections[pid] = pid, connection
            return None
        os.setsid()
        for other in (connection, self._listener, *self._pids):
            other.close()
        return {**request, "received": fds}

    def _hear(self, connection: socket.socket) -> None:
        pid = self._pids[connection]
        numbers = b""
        with contextlib.suppress(ConnectionError):
            numbers = connection.recv(64)
        for number in numbers or [signal.SIGKILL]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)
        if not numbers:
            self._forget(connection)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                if connection := self._connections.get(pid):
                    with contextlib.suppress(ConnectionError):
                        connection.sendall(b"%d" % os.waitstatus_to_exitcode(status))
                    self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        self._connections.pop(self._pids.pop(connection))
        connection.close()

    def _end_all(self) -> None:
        for pid in self._connections:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _place(received: list[int], numbers: list[int]) -> None:
    """Give received files the numbers that they have in the client."""
    # First above all numbers: a received one may have the number of another.
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1 + max(received + numbers)) for fd in received]
    for fd in received:
        os.close(fd)
    for fd, number in zip(copies, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _prepare(request: dict) -> None:
    """Make this process what the interpreter would be: environment, folder, arguments, search path."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    sys.argv = request["words"]
    os.getppid = lambda: request["parent"]
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        is_buffered = number == 1 and not os.isatty(1) and not os.environ.get("PYTHONUNBUFFERED")
        errors = "backslashreplace" if name == "stderr" else "strict"
        stream = open(  # noqa: SIM115
            number, mode, buffering=-1 if number == 0 or is_buffered else 1, errors=errors, closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    import numpy as np
    import torch

    np.random.seed()  # noqa: NPY002 - no two programs have the state of the server
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))


def _run(request: dict) -> None:
    _prepare(request)
    words = sys.argv
    if words[0] == "-c":
        module = ModuleType("__main__")
        sys.modules["__main__"] = module
        sys.argv, sys.path[:0] = ["-c", *words[2:]], [""]
        exec(compile(words[1], "<string>", "exec"), module.__dict__)
    elif words[0] == "-m":
        sys.argv, sys.path[:0] = words[1:], [os.getcwd()]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[:0] = [str(Path(words[0]).parent)]
        runpy.run_path(words[0], run_name="__main__")


def _main() -> None:
    # A test run that is killed leaves no server.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    listener = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    if request := _Server(listener).serve():
        _run(request)


if __name__ == "__main__":
    _main()
