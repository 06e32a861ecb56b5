"""The processes of a job, on all its hosts: none outlives the launcher."""

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

# sshd refuses some of more than ten connections that have not yet logged in.
_MAX_COMING_PER_HOST = 8
_DOOR_TIMEOUT_S = 30.0


class RankGroup:
    """Starts processes and hears of their ends. A context: leaving it ends those that are left.

    Args:
        grace_s: seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, *, grace_s: float) -> None:
        self.processes: dict[str, RankProcess] = {}
        self._grace_s = grace_s
        self._ends: queue.SimpleQueue[RankEnd] = queue.SimpleQueue()
        self._signals: list[int] = []
        self._doors: dict[str, threading.Semaphore] = {}

    def __enter__(self) -> Self:
        self._guard = OrphanGuard()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.terminate()
        finally:
            self._guard.close()

    def start(self, start: RankStart) -> RankProcess:
        """Starts a process; signals that were passed on before reach it too.

        Raises:
            StartError: the command, or the shell to its host, cannot be started.
            OSError: the files for its output cannot be written, or the guard of this machine's processes is gone.
        """
        assert start.worker_id not in self.processes
        if start.remote_command is None:
            process = RankProcess(start, guard=self._guard, ends=self._ends)
        else:
            process = self._start_remote(start)
        self.processes[start.worker_id] = process
        for number in self._signals:
            process.send(number)
        return process

    def next_end(self, timeout_s: float | None = None) -> RankEnd | None:
        """The next process that has ended, in the order of their ends; None if there is none in time."""
        try:
            return self._ends.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def pass_on(self, number: int) -> None:
        """Sends a signal to all processes; those that are started later get it too. For signal handlers."""
        self._signals.append(number)
        for process in tuple(self.processes.values()):
            process.send(number)

    def terminate(self, worker_ids: Iterable[str] | None = None) -> None:
        """Ends these processes, or all, together with their children, and forgets them.

        Their ends are still reported by `next_end`.
        """
        chosen = list(self.processes if worker_ids is None else worker_ids)
        processes = [self.processes[worker_id] for worker_id in chosen]
        for process in processes:
            process.begin_end(self._grace_s)
        deadline_s = time.monotonic() + self._grace_s
        with contextlib.ExitStack() as ends:
            # Trouble with one is no reason to leave another running.
            for worker_id in reversed(chosen):
                ends.callback(self._finish_end, worker_id, deadline_s)
        # One moment for all: children that left their group may hold the output of each rank open.
        drained_s = time.monotonic() + DRAIN_TIMEOUT_S
        for process in processes:
            process.drain(drained_s)

    def _finish_end(self, worker_id: str, deadline_s: float) -> None:
        try:
            self.processes[worker_id].finish_end(deadline_s)
        finally:
            del self.processes[worker_id]

    def _start_remote(self, start: RankStart) -> RankProcess:
        door = self._doors.setdefault(start.host, threading.Semaphore(_MAX_COMING_PER_HOST))
        door.acquire(timeout=_DOOR_TIMEOUT_S)
        try:
            process = RemoteRankProcess(start, guard=self._guard, ends=self._ends, grace_s=self._grace_s)
        except BaseException:
            door.release()
            raise

        def open_door() -> None:
            process.has_come.wait()
            door.release()

        threading.Thread(target=open_door, daemon=True).start()
        return process
