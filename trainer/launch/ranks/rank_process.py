"""Starts the process of one rank on this machine, forwards its output, and signals it together with its children.

`rank_group` has the class for other hosts. Invariant: signals are sent only to process groups that these two
modules have started. Once the leader of a group is reaped, another group may get the same number. So a leader is
reaped only after the last signal to its group.
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
from datasvc.trainer.launch.ranks.rank_output import LinePump, screen_writer
from datasvc.trainer.launch.ranks.remote_guard import wait_for_end

# How long to wait for the remaining output of a process that has ended. Its children may keep the streams open.
DRAIN_TIMEOUT_S = 2.0
# Last lines of standard output in a message. More would hide the traceback, which follows from standard error.
_NUM_OUTPUT_LINES = 5


class StartError(OSError):
    """The program, or the remote shell, cannot be started; the cause is the error of the operating system.

    Attributes:
        exit_status: that of a shell: 127 if the program does not exist, 126 if it cannot be started.
    """

    @property
    def exit_status(self) -> int:  # noqa: D102 - see the class
        return 127 if isinstance(self.__cause__, FileNotFoundError) else 126


@dataclass(frozen=True, kw_only=True)
class RankStart:
    """The description of a process to start.

    Attributes:
        worker_id: name of the process in its `RankEnd`; unique among the processes that share a queue.
        environ: complete environment of a process on this machine; on another host, additions to the login
            environment.
        host: name of the host, for messages.
        remote_command: command, run here, that starts `remote_guard` on the other host, which starts the rank. None
            for a process on this machine.
        master_addresses: addresses of this machine; the first one at which a remote rank reaches MASTER_PORT becomes
            its MASTER_ADDR. Empty to keep MASTER_ADDR from `environ`.
        num_neighbours: for a remote rank, number of ranks on its host, which share its processors equally, unless
            `environ` sets the number of threads.
        label: prefix of lines of output, printed as `[label]`; empty for no prefix.
        output_folder: folder for the files `stdout` and `stderr`; None for no files.
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
    """The end of a process.

    `returncode` is -N if signal N ended the process. `has_started` is False if the command never ran. `returncode` is
    then that of ssh if the host was unreachable, or `StartError.exit_status`.
    """

    worker_id: str
    returncode: int
    has_started: bool = True


class RankProcess:
    """The process of a rank on this machine; `RemoteRankProcess` is its subclass for other hosts.

    The `guard` kills it if the launcher is killed. The queue `ends` gets a `RankEnd` when it ends for any reason.

    Raises:
        StartError: the command cannot be started.
        OSError: the output files cannot be written, or the guard process has exited.
    """

    def __init__(self, start: RankStart, *, guard: OrphanGuard, ends: queue.SimpleQueue[RankEnd]) -> None:
        self.worker_id = start.worker_id
        self.host = start.host
        self.returncode: int | None = None
        # A description such as "was not started: ..." if the return code alone does not explain the end.
        self.trouble: str | None = None
        # Set when the command has started, or can no longer start.
        self.startup_done = threading.Event()
        self._start = start
        self._guard = guard
        self._ends = ends
        self._has_ended = threading.Event()
        # Whether the process has been reaped or will be reaped next; then no signal is sent any more.
        self._is_closed = False
        with contextlib.ExitStack() as files:
            # Opened first, so that a failure here leaves no process to terminate.
            self._files = {stream: self._open_files(stream, files) for stream in ("stdout", "stderr")}
            self._process = self._start_process()
            # From here on the files stay open; the line pumps close them.
            files.pop_all()
        self.pid = self._process.pid
        try:
            self._connect()
        except BaseException:
            # The process is not registered anywhere yet, so it must be killed here.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            raise

    @property
    def is_running(self) -> bool:
        """Whether the command runs: its end has not been reported yet."""
        return not self._has_ended.is_set()

    def send(self, signal_number: int) -> None:
        """Send a signal to the process and its children. Has no effect after `finish_termination`."""
        if self._is_closed:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal_number)

    def notify(self, signal_number: int) -> None:
        """Send a signal to the process alone: its children, such as workers of a loader, do not handle SIGUSR1."""
        if not self._is_closed:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal_number)

    def begin_termination(self, grace_s: float) -> None:  # noqa: ARG002 - used by remote processes
        """Send SIGTERM to the process and its children."""
        self.send(signal.SIGTERM)

    def finish_termination(self, deadline_s: float) -> None:
        """Wait for the end until `deadline_s` (monotonic clock). Then kill the process group, and reap its leader."""
        if self._is_closed:
            return
        self._has_ended.wait(max(0.0, deadline_s - time.monotonic()))
        self.send(signal.SIGKILL)
        # The thread `_watch` must observe the end before the process is reaped.
        self._has_ended.wait()
        # Set before the process is reaped: afterwards its number may belong to another process.
        self._is_closed = True
        self._guard.remove(self.pid)
        self._process.wait()

    def drain(self, deadline_s: float) -> None:
        """Wait for the end of the output, which a child may keep open, at most until `deadline_s` (monotonic)."""
        for pump in (self._output, self._errors):
            pump.last_lines(timeout_s=max(0.0, deadline_s - time.monotonic()))

    def last_lines(self, *, timeout_s: float = DRAIN_TIMEOUT_S) -> tuple[str, ...]:
        """Return the last lines of the process: a few of standard output, then those of standard error.

        If the process has ended, wait up to `timeout_s` for the remaining lines.
        """
        deadline_s = time.monotonic() + (0.0 if self.is_running else timeout_s)
        # Both streams, because a program that catches its own exception may print it to either one.
        output = self._output.last_lines(timeout_s=max(0.0, deadline_s - time.monotonic()))
        errors = self._errors.last_lines(timeout_s=max(0.0, deadline_s - time.monotonic()))
        return (*output[-_NUM_OUTPUT_LINES:], *errors)

    def _start_process(self) -> subprocess.Popen[bytes]:
        return self._popen(self._start.command, stdin=subprocess.DEVNULL, env=dict(self._start.environ))

    def _popen(
        self, command: Sequence[str], *, stdin: int, env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(  # noqa: S603 - running the user's command is the purpose
                command,
                env=env,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # A separate group: the rank is terminated with its children, and Ctrl-C reaches the launcher only.
                process_group=0,
            )
        except OSError as error:
            raise StartError(f"cannot run {command[0]}: {error}") from error

    def _connect(self) -> None:
        """Register the process with the guard, and start the threads for its output and its end."""
        self._guard.add(self.pid)
        self.startup_done.set()
        self._pump_output()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        self._report_end(wait_for_end(self.pid), has_started=True)

    def _report_end(self, returncode: int, *, has_started: bool) -> None:
        self.returncode = returncode
        self._has_ended.set()
        self.startup_done.set()
        self._ends.put(RankEnd(self.worker_id, returncode, has_started))

    def _pump_output(self, mark: bytes | None = None, on_report: Callable[[str], None] | None = None) -> None:
        """Start the threads that forward the output. For the arguments, see `LinePump`."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        prefix = f"[{self._start.label}] ".encode() if self._start.label else b""
        read_clock = dt.datetime.now if self._start.stamps_lines else None

        def pump(source: IO[bytes], name: str, mark: bytes | None = None) -> LinePump:
            return LinePump(
                source,
                screen_writer(name),
                self._files[name],
                prefix=prefix,
                read_clock=read_clock,
                mark=mark,
                on_report=on_report,
            )

        self._output = pump(self._process.stdout, "stdout")
        self._errors = pump(self._process.stderr, "stderr", mark)

    def _open_files(self, stream: str, files: contextlib.ExitStack) -> list[IO[bytes]]:
        """Return a list of the output file of a stream; an empty list if there is no output folder."""
        folder = self._start.output_folder
        if folder is None:
            return []
        folder.mkdir(parents=True, exist_ok=True)
        return [files.enter_context((folder / stream).open("wb"))]
