"""The processes of a job on all its hosts, with the class for other hosts. Invariant: none outlives the launcher."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from datasvc.trainer.launch.ranks import remote_guard
from datasvc.trainer.launch.ranks.job import describe_end
from datasvc.trainer.launch.ranks.orphan_guard import OrphanGuard, release_in_forked_children
from datasvc.trainer.launch.ranks.rank_process import DRAIN_TIMEOUT_S, RankEnd, RankProcess, RankStart
from datasvc.trainer.launch.ranks.remote_guard import wait_for_end

# By default, sshd starts to refuse connections when more than ten have not logged in yet.
_MAX_LOGINS_PER_HOST = 8
# How long the next login waits for one of these to complete.
_LOGIN_TIMEOUT_S = 30.0


# Reads the length and the source of the guard from standard input. Contains no character that is special to a shell.
BOOTSTRAP = "import sys;i=sys.stdin.buffer;exec(i.read(int(i.readline())))"
# Time for the shell, beyond the grace time of the rank, to forward the order and to exit.
_SHELL_MARGIN_S = 5.0


class RankGroup:
    """The running processes of a job, as a context manager that terminates the remaining ones at its end.

    Args:
        grace_s: seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, *, grace_s: float) -> None:
        # By worker id. A process that has ended by itself stays here until `terminate` removes it.
        self.processes: dict[str, RankProcess] = {}
        self._grace_s = grace_s
        self._ends: queue.SimpleQueue[RankEnd] = queue.SimpleQueue()
        # The signals forwarded so far, for processes that start later.
        self._signals: list[int] = []
        self._notices: list[int] = []
        # Limits of concurrent logins, by host.
        self._login_slots: dict[str, threading.Semaphore] = {}

    def __enter__(self) -> Self:
        self._guard = OrphanGuard()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.terminate()
        finally:
            self._guard.close()

    def start(self, start: RankStart) -> RankProcess:
        """Start a process. Signals that were forwarded earlier are sent to it too.

        Raises:
            StartError: the command, or the remote shell, cannot be started.
            OSError: the output files cannot be written, or the guard process of this machine has exited.
        """
        assert start.worker_id not in self.processes
        num_notices = len(self._notices)
        if start.remote_command is None:
            process = RankProcess(start, guard=self._guard, ends=self._ends)
        else:
            process = self._start_remote(start)
        self.processes[start.worker_id] = process
        # The process is registered first: `forward_signal` sends it any later signal, and this loop the earlier ones.
        for number in self._signals:
            process.send(number)
        # Of the notices, only those that came while it was started: its program may not take earlier ones.
        for number in self._notices[num_notices:]:
            process.notify(number)
        return process

    @property
    def first_signal(self) -> int | None:
        """Number of the first signal that was forwarded; None before that."""
        return self._signals[0] if self._signals else None

    def next_end(self, timeout_s: float | None = None) -> RankEnd | None:
        """Wait for the next end of a process and return it; None after `timeout_s`. The ends come in their order."""
        try:
            return self._ends.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def forward_signal(self, number: int) -> None:
        """Forward a signal to all processes, also to those that start later; signal handlers call this."""
        self._signals.append(number)
        for process in tuple(self.processes.values()):
            process.send(number)

    def notify(self, number: int) -> None:
        """Send a signal that does not end the job, such as SIGUSR1, to the processes, and not to their children."""
        self._notices.append(number)
        for process in tuple(self.processes.values()):
            process.notify(number)

    def terminate(self, worker_ids: Iterable[str] | None = None) -> None:
        """Terminate these processes, or all, with their children, and remove them from the group.

        `next_end` still returns their ends.
        """
        chosen = list(self.processes if worker_ids is None else worker_ids)
        processes = [self.processes[worker_id] for worker_id in chosen]
        for process in processes:
            process.begin_termination(self._grace_s)
        deadline_s = time.monotonic() + self._grace_s
        with contextlib.ExitStack() as stack:
            # An error with one process must not leave another one running. The stack calls the last callback first.
            for worker_id in reversed(chosen):
                stack.callback(self._finish_termination, worker_id, deadline_s)
        # One deadline for all: children that left their group may keep the output of every rank open.
        drain_deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
        for process in processes:
            process.drain(drain_deadline_s)

    def _finish_termination(self, worker_id: str, deadline_s: float) -> None:
        try:
            self.processes[worker_id].finish_termination(deadline_s)
        finally:
            del self.processes[worker_id]

    def _start_remote(self, start: RankStart) -> RankProcess:
        """Start a process on another host. Slots limit the number of logins to this host at the same time."""
        slot = self._login_slots.setdefault(start.host, threading.Semaphore(_MAX_LOGINS_PER_HOST))
        # After the timeout, log in without a slot: a slow host must not stop the start of the job.
        has_slot = slot.acquire(timeout=_LOGIN_TIMEOUT_S)
        try:
            process = RemoteRankProcess(start, guard=self._guard, ends=self._ends, grace_s=self._grace_s)
        except BaseException:
            if has_slot:
                slot.release()
            raise

        def release_slot() -> None:
            # The login is over when the command runs, or can no longer start.
            process.startup_done.wait()
            if has_slot:
                slot.release()

        threading.Thread(target=release_slot, daemon=True).start()
        return process


# The standard input of the shell carries the source of the guard (see `remote_guard`), then the order to start the
# rank, then lines for signals and termination. The environment is in the order, not in the command line, where a list
# of processes would show it. The shell needs no orphan guard: when the launcher dies, the input of the shell ends,
# and the remote guard terminates the rank.


class RemoteRankProcess(RankProcess):
    """The process of a rank on another host. `pid` is that of the shell on this machine.

    The arguments and errors are those of `RankProcess`, for the shell. OSError may also mean that the current folder
    does not exist any more. `grace_s` is the time from SIGTERM to SIGKILL, in seconds, if the launcher is lost.
    """

    def __init__(
        self, start: RankStart, *, guard: OrphanGuard, ends: queue.SimpleQueue[RankEnd], grace_s: float
    ) -> None:
        self._grace_s = grace_s
        # Random, so that no output of the rank can be taken for a report of the guard.
        self._mark = f"\x1etrainer-{secrets.token_hex(8)} "
        self._has_started = False
        self._shell_has_ended = threading.Event()
        # Texts for the standard input of the guard; None closes it.
        self._orders: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Serialises `_report_once`: the guard's report and the end of the shell arrive in two threads.
        self._lock = threading.Lock()
        super().__init__(start, guard=guard, ends=ends)

    def send(self, signal_number: int) -> None:
        """Send a signal to the process and its children, if the host is reachable."""
        self._orders.put(f"signal {int(signal_number)}\n".encode())

    def notify(self, signal_number: int) -> None:
        """Send a signal to the process alone, if the host is reachable."""
        self._orders.put(f"notify {int(signal_number)}\n".encode())

    def begin_termination(self, grace_s: float) -> None:
        """Order the remote guard to terminate the process and its children."""
        self._orders.put(f"end {grace_s}\n".encode())
        self._orders.put(None)

    def finish_termination(self, deadline_s: float) -> None:
        """Wait for the shell, which ends after the rank. Kill it if it runs too long after the deadline."""
        if self._is_closed:
            return
        # Closes the input of the shell if `begin_termination` was not called, and has no effect otherwise.
        self._orders.put(None)
        # If no rank has started, there is nothing to wait for: the guard stops at the end of its input.
        limit_s = deadline_s + _SHELL_MARGIN_S - time.monotonic() if self._has_started else 0.0
        if not self._shell_has_ended.wait(max(0.0, limit_s)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._shell_has_ended.wait()
        self._is_closed = True
        self._process.wait()

    def _start_process(self) -> subprocess.Popen[bytes]:
        assert self._start.remote_command is not None
        return self._popen(self._start.remote_command, stdin=subprocess.PIPE)

    def _connect(self) -> None:
        assert self._process.stdin is not None
        release_in_forked_children(self._process.stdin)
        self._orders.put(self._first_order())
        self._pump_output(self._mark.encode(), self._handle_report)
        threading.Thread(target=self._watch, daemon=True).start()
        # Started last, because the host starts nothing before it has the order. A thread writes the order: it may be
        # larger than the pipe buffer, and the host may be slow to read it.
        threading.Thread(target=self._write_orders, daemon=True).start()

    def _first_order(self) -> bytes:
        """Return the length and the source of the guard for `BOOTSTRAP`, and the order to start the rank."""
        source = Path(remote_guard.__file__).read_bytes()
        order = {
            "mark": self._mark,
            "command": list(self._start.command),
            "environ": dict(self._start.environ),
            "folder": str(Path.cwd()),
            "grace_s": self._grace_s,
            "master_addresses": list(self._start.master_addresses),
            "num_neighbours": self._start.num_neighbours,
        }
        return b"%d\n%s%s\n" % (len(source), source, json.dumps(order).encode())

    def _write_orders(self) -> None:
        assert self._process.stdin is not None
        # Write errors are ignored: `_watch` reports the end of the shell.
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            while (order := self._orders.get()) is not None:
                pipe.write(order)
                pipe.flush()

    def _handle_report(self, report: str) -> None:
        kind, _, details = report.partition(" ")
        if kind == "started":
            self._has_started = True
            self.startup_done.set()
        elif kind == "ended":
            self._report_once(int(details))
        elif kind == "refused":
            status, _, reason = details.partition(" ")
            self._report_once(int(status), f"was not started: {reason}")

    def _watch(self) -> None:
        returncode = wait_for_end(self.pid)
        self._shell_has_ended.set()
        # Wait for a report of the guard that is still in transit: it is more precise than the shell's return code.
        self._errors.last_lines(timeout_s=DRAIN_TIMEOUT_S)
        assert self._start.remote_command is not None
        shell_end = f"{self._start.remote_command[0]} to {self.host} {describe_end(returncode)}"
        # Status 0 of the shell is no success without a report of the guard. 255 is the status of ssh's own errors.
        self._report_once(returncode or 255, f"was {'lost' if self._has_started else 'not started'}: {shell_end}")

    def _report_once(self, returncode: int, trouble: str | None = None) -> None:
        """Report the end of the rank if it was not reported before; for `trouble`, see `RankProcess`."""
        with self._lock:
            if self.is_running:
                self.trouble = trouble
                self._report_end(returncode, has_started=self._has_started)
