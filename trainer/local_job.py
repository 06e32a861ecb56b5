"""Runs the ranks of a job on this machine and ends them together.

Invariant: no rank outlives the job. A rank that fails takes the others with it; so do a signal to the
    launcher and, through the orphan guard, its sudden death. Signals go only to process groups that this file
    has started.
"""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from trainer import orphan_guard
from trainer.rank_output import LinePump

_HOST = "127.0.0.1"
_DRAIN_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """What to run.

    Args:
        command: the program and its arguments, started once per rank.
        num_ranks: how many.
        grace_s: seconds between SIGTERM and SIGKILL when the others are ended.
        prefixes_lines: whether lines of output begin with ``[rank]``.
        output_folder: also write ``rank.N/stdout`` and ``rank.N/stderr`` there; None for no files.
    """

    command: Sequence[str]
    num_ranks: int
    grace_s: float = 5.0
    prefixes_lines: bool = True
    output_folder: Path | None = None


@dataclass(frozen=True)
class Failure:
    """The first rank that did not end with status 0. ``returncode`` is negative for a signal."""

    rank: int
    returncode: int
    last_lines: tuple[str, ...]

    @property
    def exit_status(self) -> int:
        """What a shell would report."""
        return self.returncode if self.returncode > 0 else 128 - self.returncode

    def describe(self) -> str:
        """For people: which rank, how, and the end of its standard error."""
        if self.returncode > 0:
            how = f"exited with status {self.returncode}"
        else:
            how = f"was killed by {signal.Signals(-self.returncode).name}"
        text = f"rank {self.rank} was the first to fail: it {how}"
        return "\n".join([text, *(f"  [{self.rank}] {line}" for line in self.last_lines)])


def run_local_job(job: LocalJob, environ: Mapping[str, str]) -> Failure | None:
    """Runs all ranks to their end. SIGINT and SIGTERM are passed on to them meanwhile.

    Must be called from the main thread, whose signal handlers it borrows.

    Returns:
        None if every rank ended with status 0.

    Raises:
        OSError: the command cannot be started.
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((_HOST, 0), backlog=max(128, 2 * job.num_ranks)))
        ranks = stack.enter_context(_Ranks(job, environ, listener.getsockname()[1]))
        stack.enter_context(_passing_on_signals(ranks))
        ranks.start()
        # The ranks connect to the port meanwhile; the kernel keeps them waiting. Held here and not by rank 0,
        # so that no one else can take the port and the store outlives every rank.
        store = _serve_store(listener)
        failure = ranks.wait()
        del store
    return failure


class _Ranks:
    """The processes of a job.

    None is reaped before all are ended: a zombie keeps its id, so signals cannot hit others.
    """

    def __init__(self, job: LocalJob, environ: Mapping[str, str], port: int) -> None:
        self._job = job
        self._environ = environ
        self._port = port
        self._processes: list[subprocess.Popen[bytes]] = []
        self._has_ended: list[threading.Event] = []
        self._ends: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._pumps: list[LinePump] = []
        self._errors: list[LinePump] = []
        self._files = contextlib.ExitStack()
        self._signals: list[int] = []

    def __enter__(self) -> Self:
        self._guard = subprocess.Popen(  # noqa: S603 - our own file
            [sys.executable, "-I", "-S", orphan_guard.__file__],
            stdin=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._end_all()
        for pump in self._pumps:
            pump.last_lines(timeout_s=_DRAIN_TIMEOUT_S)
        self._files.close()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()

    def start(self) -> None:
        """Starts every rank.

        Raises:
            OSError: the command cannot be started.
        """
        for rank in range(self._job.num_ranks):
            self._start(rank)
        for number in self._signals:
            self._send(number)

    def wait(self) -> Failure | None:
        """Returns when all ranks have ended well, or the first has failed and the others are ended."""
        for _ in self._processes:
            rank, returncode = self._ends.get()
            if returncode:
                self._end_all()
                last_lines = self._errors[rank].last_lines(timeout_s=_DRAIN_TIMEOUT_S)
                return Failure(rank, returncode, tuple(last_lines))
        return None

    def pass_on(self, number: int) -> None:
        """Sends a signal to the ranks; those that are still being started get it too."""
        self._signals.append(number)
        self._send(number)

    def _start(self, rank: int) -> None:
        process = subprocess.Popen(  # noqa: S603 - running the user's command is the purpose
            self._job.command,
            env={**self._environ, **plan_environment(rank, self._job.num_ranks, self._port, self._environ)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A group of its own: to end the rank with its children, and to leave Ctrl-C to the launcher.
            process_group=0,
        )
        self._tell_guard(f"+{process.pid}")
        self._processes.append(process)
        self._has_ended.append(threading.Event())
        assert process.stdout is not None
        assert process.stderr is not None
        self._pump(rank, process.stdout, sys.stdout.buffer, "stdout")
        self._errors.append(self._pump(rank, process.stderr, sys.stderr.buffer, "stderr"))
        threading.Thread(target=self._watch, args=(rank, process.pid), daemon=True).start()

    def _watch(self, rank: int, pid: int) -> None:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        self._ends.put((rank, end.si_status if end.si_code == os.CLD_EXITED else -end.si_status))
        self._has_ended[rank].set()

    def _send(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    def _end_all(self) -> None:
        self._send(signal.SIGTERM)
        deadline_s = time.monotonic() + self._job.grace_s
        for has_ended in self._has_ended:
            has_ended.wait(max(0.0, deadline_s - time.monotonic()))
        self._send(signal.SIGKILL)
        for process in self._processes:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            self._tell_guard(f"-{process.pid}")
            process.wait()
        self._processes = []

    def _tell_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{line}\n")

    def _pump(self, rank: int, source: IO[bytes], screen: IO[bytes], stream: str) -> LinePump:
        targets = [screen]
        if self._job.output_folder is not None:
            folder = self._job.output_folder / f"rank.{rank}"
            folder.mkdir(parents=True, exist_ok=True)
            targets.append(self._files.enter_context((folder / stream).open("wb")))
        prefix = f"[{rank}] ".encode() if self._job.prefixes_lines else b""
        self._pumps.append(LinePump(source, targets, prefix=prefix))
        return self._pumps[-1]


def plan_environment(rank: int, num_ranks: int, port: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What a rank's environment has beside the launcher's: torchrun's variables, and two of Horovod's."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        # torch's word for "the launcher serves the store, rank 0 does not".
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "HOROVOD_RANK": str(rank),
        "HOROVOD_HOSTNAME": "localhost",
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks))),
    }


def _serve_store(listener: socket.socket) -> object:
    # After the ranks have started, because torch takes seconds to load.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported

    host, port = listener.getsockname()
    # The store closes what it is given, so it gets a copy.
    fd = os.dup(listener.fileno())
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


@contextlib.contextmanager
def _passing_on_signals(ranks: _Ranks) -> Iterator[None]:
    def pass_on(number: int, _: object) -> None:
        ranks.pass_on(number)

    old = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
