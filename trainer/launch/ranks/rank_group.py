"""The processes of a job on all its hosts. Invariant: no process outlives the launcher."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterable
from typing import Self

from datasvc.trainer.launch.ranks.orphan_guard import OrphanGuard
from datasvc.trainer.launch.ranks.rank_process import DRAIN_TIMEOUT_S, RankEnd, RankProcess, RankStart
from datasvc.trainer.launch.ranks.remote_process import RemoteRankProcess

# By default, sshd starts to refuse connections when more than ten have not logged in yet.
_MAX_LOGINS_PER_HOST = 8
# How long the next login waits for one of these to complete.
_LOGIN_TIMEOUT_S = 30.0


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
        if start.remote_command is None:
            process = RankProcess(start, guard=self._guard, ends=self._ends)
        else:
            process = self._start_remote(start)
        self.processes[start.worker_id] = process
        # The process is registered first: `forward_signal` sends it any later signal, and this loop the earlier ones.
        for number in self._signals:
            process.send(number)
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
