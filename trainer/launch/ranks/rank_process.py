"""One rank's command as a process: started, heard, signalled and ended, with its children.

The class here runs it on this machine; `remote_process` has the one for other hosts. Signals go only to process
groups that these files have started: an ended leader is not reaped before its group is, because a zombie keeps its
number.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from datasvc.trainer.launch.ranks.orphan_guard import OrphanGuard
from datasvc.trainer.launch.ranks.rank_output import LinePump, screen

DRAIN_TIMEOUT_S = 2.0
# More would hide the traceback that follows them.
_NUM_OUTPUT_LINES = 5


class StartError(OSError):
    """The program, or the shell that leads to its host, cannot be started; caused by what the system said."""


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """What to start and where.

    Args:
        worker_id: how its end is reported; unique among the processes that share a queue.
        command: the program and its arguments.
        environ: all variables of a process on this machine; elsewhere, what is set on top of the login's.
        host: the name of the host, for messages.
        remote_command: started here instead, it runs the guard of a remote rank on the host; None for a process on
            this machine.
        master_addresses: addresses of this machine; a remote rank's MASTER_ADDR is the first of them at which
            MASTER_PORT answers there. Empty to keep the one of `environ`.
        num_neighbours: how many ranks share the processors of another host, this one counted: the threads of each
            are its share, unless `environ` says how many.
        label: lines of output begin with `[label]`; empty for no prefix.
        stamps_lines: whether the time when a line came is put before that.
        output_folder: the files `stdout` and `stderr` are written there too; None for no files.
    """

    worker_id: str
    command: Sequence[str]
    environ: Mapping[str, str]
    host: str = "localhost"
    remote_command: Sequence[str] | None = None
    master_addresses: Sequence[str] = ()
    num_neighbours: int = 1
    label: str = ""
    stamps_lines: bool = False
    output_folder: Path | None = None


@dataclass(frozen=True)
class RankEnd:
    """A process has ended by itself.

    `returncode` is negative for a signal. `has_started` is False when the command never ran: its host was out
    of reach (the return code is then that of ssh), or the program is not there (127).
    """

    worker_id: str
    returncode: int
    has_started: bool = True


class RankProcess:
    """A rank's process on this machine.

    Args:
        start: what to run.
        guard: ends the process should this one be killed.
        ends: gets a `RankEnd` when the process ends, whoever ended it.

    Raises:
        StartError: the command cannot be started.
        OSError: the files for its output cannot be written, or the guard is gone.
    """

    def __init__(self, start: RankStart, *, guard: OrphanGuard, ends: queue.SimpleQueue[RankEnd]) -> None:
        self.worker_id = start.worker_id
        self.host = start.host
        self.returncode: int | None = None
        # What happened to it, where its return code does not say so: "was not started: ...".
        self.trouble: str | None = None
        # Set once the command runs, or cannot any more.
        self.has_come = threading.Event()
        self._start = start
        self._guard = guard
        self._ends = ends
        self._has_ended = threading.Event()
        self._is_closed = False
        with contextlib.ExitStack() as files:
            # Before there is a process that would have to be ended.
            self._files = {stream: self._open_files(stream, files) for stream in ("stdout", "stderr")}
            self._process = self._open()
            files.pop_all()
        self.pid = self._process.pid
        try:
            self._connect()
        except BaseException:
            # Nobody else knows of it yet.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            raise

    @property
    def is_running(self) -> bool:
        """Whether the rank's command has not ended, as far as is known here."""
        return not self._has_ended.is_set()

    def send(self, number: int) -> None:
        """Sends a signal to the process and its children. Does nothing once they have been ended."""
        if self._is_closed:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def begin_end(self, grace_s: float) -> None:  # noqa: ARG002 - a remote guard wants to know
        """Asks the process and its children to end."""
        self.send(signal.SIGTERM)

    def finish_end(self, deadline_s: float) -> None:
        """Waits until the monotonic clock's `deadline_s`, then kills. Returns when the process is gone."""
        if self._is_closed:
            return
        self._has_ended.wait(max(0.0, deadline_s - time.monotonic()))
        self.send(signal.SIGKILL)
        # The watching thread has seen the end before the process is reaped.
        self._has_ended.wait()
        # Before it is reaped: its number may then be another's.
        self._is_closed = True
        self._guard.remove(self.pid)
        self._process.wait()

    def drain(self, deadline_s: float) -> None:
        """Waits for the rest of its output, which a child may hold open, until the clock's `deadline_s`."""
        for pump in (self._output, self._errors):
            pump.last_lines(timeout_s=max(0.0, deadline_s - time.monotonic()))

    def last_lines(self, *, timeout_s: float = DRAIN_TIMEOUT_S) -> tuple[str, ...]:
        """The last lines of its output: a few of standard output, then those of its standard error.

        Waits for the rest of them when the process has ended.
        """
        deadline_s = time.monotonic() + (0.0 if self.is_running else timeout_s)
        # A program that catches its own exception may print it to either.
        output, errors = (
            pump.last_lines(timeout_s=max(0.0, deadline_s - time.monotonic()))
            for pump in (self._output, self._errors)
        )
        return (*output[-_NUM_OUTPUT_LINES:], *errors)

    def _open(self) -> subprocess.Popen[bytes]:
        return self._run(self._start.command, stdin=subprocess.DEVNULL, env=dict(self._start.environ))

    def _run(
        self, command: Sequence[str], *, stdin: int, env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(  # noqa: S603 - running the user's command is the purpose
                command,
                env=env,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # A group of its own: to end the rank with its children, and to leave Ctrl-C to the launcher.
                process_group=0,
            )
        except OSError as error:
            raise StartError(f"cannot run {command[0]}: {error}") from error

    def _connect(self) -> None:
        self._guard.add(self.pid)
        self.has_come.set()
        self._pump_output()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        self._report_end(wait_for_end(self.pid), has_started=True)

    def _report_end(self, returncode: int, *, has_started: bool) -> None:
        self.returncode = returncode
        self._has_ended.set()
        self.has_come.set()
        self._ends.put(RankEnd(self.worker_id, returncode, has_started))

    def _pump_output(self, mark: bytes | None = None, on_report: Callable[[str], None] | None = None) -> None:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        prefix = f"[{self._start.label}] ".encode() if self._start.label else b""
        read_clock = dt.datetime.now if self._start.stamps_lines else None
        self._output = LinePump(
            self._process.stdout, screen("stdout"), self._files["stdout"], prefix=prefix, read_clock=read_clock
        )
        self._errors = LinePump(
            self._process.stderr,
            screen("stderr"),
            self._files["stderr"],
            prefix=prefix,
            read_clock=read_clock,
            mark=mark,
            on_report=on_report,
        )

    def _open_files(self, stream: str, files: contextlib.ExitStack) -> list[IO[bytes]]:
        folder = self._start.output_folder
        if folder is None:
            return []
        folder.mkdir(parents=True, exist_ok=True)
        return [files.enter_context((folder / stream).open("wb"))]


def wait_for_end(pid: int) -> int:
    """The return code of a child, which stays a zombie."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
