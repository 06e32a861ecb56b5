"""Runs a job with a fixed number of ranks.

Invariant: no rank outlives the job. If a rank fails, the launcher terminates the others. It forwards signals to all
ranks. If the launcher dies, the guard processes (`orphan_guard`, `remote_guard`) terminate the ranks.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datasvc.trainer.launch.ranks.hosts import is_local
from datasvc.trainer.launch.ranks.job import Host, JobFailure, LaunchJob, describe_end, exit_status_of
from datasvc.trainer.launch.ranks.placement import HostedRank, place_ranks, plan_rank_start
from datasvc.trainer.launch.ranks.rank_group import RankGroup
from datasvc.trainer.launch.ranks.rank_output import print_message
from datasvc.trainer.launch.ranks.rank_process import RankEnd, RankStart
from datasvc.trainer.launch.ranks.store import list_addresses, open_listener, serve_store
from datasvc.trainer.rendezvous.messages import PREFIX_VARIABLE, WORKER_VARIABLE, arrival_key, dropped_key

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported


_POLL_PERIOD_S = 1.0
_DEFAULT_LIMIT_S = 60.0  # without a start timeout
# The launcher may run in a rank of an elastic job. The ranks of this job do not belong to that one.
_NOT_INHERITED = frozenset({WORKER_VARIABLE, PREFIX_VARIABLE, "HOROVOD_ELASTIC"})
# A rank that fails only because another rank was lost prints this error.
_LOSS_ERROR = "HorovodInternalError"
# After a rank ends with an error, wait this long for the end of the rank that caused the error.
_CAUSE_WAIT_S = 2.0


def run_static_job(
    job: LaunchJob, environ: Mapping[str, str], *, on_signal: Callable[[int], None] = lambda _: None
) -> JobFailure | None:
    """Run all ranks to their end, and forward SIGINT and SIGTERM to them, if this is the main thread.

    Args:
        job: the job.
        environ: environment of the launcher.
        on_signal: called with the number of each signal that is forwarded.

    Returns:
        None if every rank exited with status 0.

    Raises:
        StartError: the command cannot be started.
        OSError: no port is available, or the output files cannot be written.
        ValueError: there are too few slots, or a network interface does not exist.
    """
    hosts = job.hosts or (Host("localhost", job.num_ranks),)
    ranks = place_ranks(job.num_ranks, hosts)
    other_hosts = [name for name in dict.fromkeys(hosted.host for hosted in ranks) if not is_local(name, environ)]
    addresses = list_addresses(other_hosts, job.remote.network_interfaces) if other_hosts else ()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(open_listener(job.num_ranks, for_other_hosts=bool(other_hosts)))
        group = stack.enter_context(RankGroup(grace_s=job.grace_s))

        def forward(number: int) -> None:
            on_signal(number)
            group.forward_signal(number)

        stack.enter_context(handling_signals(forward))
        stack.enter_context(handling_signals(group.notify, (signal.SIGUSR1, signal.SIGUSR2)))
        for hosted in ranks:
            group.start(_plan_start(job, hosted, environ, listener.getsockname()[1], addresses))
        # Ranks may connect before this line; the kernel queues their connections. The launcher serves the store, not
        # rank 0, so that no other process can take the port and the store outlives every rank.
        store = serve_store(listener)
        failure = _RankMonitor(job, ranks, group, store).run()
        # End the server of the store before the block closes the listener.
        del store
    return failure


def _plan_start(
    job: LaunchJob, hosted: HostedRank, environ: Mapping[str, str], port: int, addresses: tuple[str, ...]
) -> RankStart:
    """Return the description of the process of a rank. Print its host and command if the job is verbose."""
    rank = hosted.placement.rank
    if job.is_verbose:
        shell = "" if is_local(hosted.host, environ) else f" by {job.remote.shell}"
        print_message(f"rank {rank} on {hosted.host}{shell}: {shlex.join(job.command)}")
    return plan_rank_start(
        job,
        hosted,
        {name: value for name, value in {**environ, **job.variables}.items() if name not in _NOT_INHERITED},
        worker_id=str(rank),
        label=str(rank),
        folder_name=f"rank.{rank}",
        num_neighbours=hosted.placement.local_size,
        port=port,
        addresses=addresses,
    )


class _RankMonitor:
    """Watches the ranks until all have ended, one has failed, or one has not started in time."""

    def __init__(self, job: LaunchJob, ranks: list[HostedRank], group: RankGroup, store: TCPStore) -> None:
        self._job = job
        self._ranks = ranks
        self._group = group
        self._store = store
        self._running = set(range(job.num_ranks))
        self._is_trained = False  # a worker of parameter servers has succeeded: these have ended the training
        self._called_init: set[int] = set()
        now_s = time.monotonic()
        self._deadline_s = None if job.time_limit_s is None else now_s + job.time_limit_s
        self._arrivals = Arrivals(
            job.num_ranks,
            limit_s=_DEFAULT_LIMIT_S if job.start_timeout_s is None else job.start_timeout_s,
            now_s=now_s,
        )

    def run(self) -> JobFailure | None:
        """Wait until all ranks have succeeded, or one has failed and the others are terminated."""
        while self._running:
            waits = self._arrivals.is_over and self._deadline_s is None
            end = self._group.next_end(None if waits else _POLL_PERIOD_S)
            if end is None:
                failure = self._check_late_ranks() or self._check_time_limit()
            else:
                self._running.discard(int(end.worker_id))
                self._is_trained |= not end.returncode and int(end.worker_id) >= self._job.num_servers
                if self._job.num_servers and end.worker_id == "0" and not end.returncode:
                    self._end_dropped_ranks()
                failure = self._failure_of(self._find_cause(end)) if end.returncode and self._is_needed(end) else None
            if failure is not None:
                self._group.terminate()
                return failure
        return None

    def _end_dropped_ranks(self) -> None:
        """Terminate the workers that the servers have dropped, after the training: such as is stopped never ends."""
        dropped = [rank for rank in sorted(self._running) if self._store.check([dropped_key(rank)])]
        if dropped:
            print_message(f"the job is over: terminating {self._names_of(dropped)}, which gave no sign of life")
            self._running.difference_update(dropped)
            self._group.terminate(map(str, dropped))

    def _is_needed(self, end: RankEnd) -> bool:
        """Return whether the job cannot go on without a rank that has failed; if it can, print a message."""
        rank, num_servers = int(end.worker_id), self._job.num_servers
        # Without servers, all ranks are needed. With them, one worker is enough, and after the training none.
        is_last = max(self._running, default=0) < num_servers and not self._is_trained
        if not num_servers or rank < num_servers or is_last:
            return True
        if self._group.first_signal is None:
            reason = self._group.processes[end.worker_id].trouble or describe_end(end.returncode)
            print_message(f"the job goes on without {self._names_of([rank])}, which {reason}")
        return False

    def _find_cause(self, end: RankEnd) -> RankEnd:
        """Return the end of the rank that failed first, or `end` if no such rank ends within `_CAUSE_WAIT_S`."""
        # A rank that only lost the connection to the failed rank often ends before the failed rank does.
        deadline_s = time.monotonic() + _CAUSE_WAIT_S
        next_end: RankEnd | None = end
        while next_end is not None:
            self._running.discard(int(next_end.worker_id))
            if next_end.returncode and not self._reports_only_loss(next_end, deadline_s):
                return next_end
            if not self._running:
                # Every rank reports only the loss of another rank, so the first end is the best guess.
                break
            next_end = self._group.next_end(max(0.0, deadline_s - time.monotonic()))
        return end

    def _reports_only_loss(self, end: RankEnd, deadline_s: float) -> bool:
        """Return whether the rank failed only because another rank was lost: it ended with `_LOSS_ERROR`."""
        left_s = max(0.0, deadline_s - time.monotonic())
        last_lines = self._group.processes[end.worker_id].last_lines(timeout_s=left_s)
        return end.returncode == 1 and any(_LOSS_ERROR in line for line in last_lines)

    def _failure_of(self, end: RankEnd) -> JobFailure:
        """Return the failure of the job for the end of the rank that failed first."""
        number = self._group.first_signal
        if number is not None and exit_status_of(end.returncode) == 128 + number:
            # The rank ended because of the signal, so it has not failed, and its last lines explain nothing.
            text = f"ended by {signal.Signals(number).name}"
            return JobFailure(exit_status=128 + number, text=text, rank=int(end.worker_id))
        reason = self._group.processes[end.worker_id].trouble or describe_end(end.returncode)
        return self._make_failure(int(end.worker_id), end.returncode, reason)

    def _check_late_ranks(self) -> JobFailure | None:
        """Return a failure if ranks are late. Without a start timeout, only print a note, and return None."""
        processes = self._group.processes
        started = {rank for rank in range(self._job.num_ranks) if processes[str(rank)].startup_done.is_set()}
        ended = set(range(self._job.num_ranks)) - self._running
        unknown = self._running - self._called_init
        self._called_init |= {rank for rank in unknown if self._store.check([arrival_key(rank)])}
        # An ended rank counts as one that has called init(), but only after a running rank has called it. Otherwise
        # the end of a rank would start the time limit even for a program that never calls init().
        called = self._called_init | ended if self._called_init else set()
        late = self._arrivals.find_late(now_s=time.monotonic(), started=started | ended, called=called)
        if late is None:
            return None
        if self._job.start_timeout_s is None:
            names = self._names_of(late.ranks)
            print_message(f"still waiting: {names} did not {late.missing_step} within {_DEFAULT_LIMIT_S:g} s")
            return None
        reason = f"did not {late.missing_step} within {self._job.start_timeout_s:g} s"
        if len(late.ranks) > 1:
            reason += f"; {self._names_of(late.ranks[1:])} did not either"
        return self._make_failure(late.ranks[0], 1, reason)  # 1: the rank has no return code yet

    def _check_time_limit(self) -> JobFailure | None:
        """Return a failure of the first running rank if the job has reached its time limit."""
        if self._deadline_s is None or time.monotonic() < self._deadline_s:
            return None
        return self._make_failure(min(self._running), 1, f"did not end within {self._job.time_limit_s:g} s")

    def _make_failure(self, rank: int, returncode: int, reason: str) -> JobFailure:
        return JobFailure(
            exit_status=exit_status_of(returncode),
            text=f"{self._names_of([rank])} was the first to fail: it {reason}",
            rank=rank,
            last_lines=self._group.processes[str(rank)].last_lines(),
        )

    def _names_of(self, ranks: Sequence[int]) -> str:
        if not self._job.hosts:
            return f"rank {', '.join(map(str, ranks))}"
        return ", ".join(f"rank {rank} on {self._ranks[rank].host}" for rank in ranks)


@contextlib.contextmanager
def handling_signals(
    handle: Callable[[int], None], numbers: Sequence[int] = (signal.SIGINT, signal.SIGTERM)
) -> Iterator[None]:
    """Call `handle` with the number of each of these signals inside the block, instead of ending this process.

    The earlier handlers are restored after the block. In another thread than the main thread, this has no effect:
    only the main thread can set signal handlers.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handled = numbers if is_main else ()
    previous = {number: signal.signal(number, lambda number, _: handle(number)) for number in handled}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class LateRanks:
    """Ranks that have not made a step in time. `missing_step` follows "did not", such as "start"."""

    ranks: tuple[int, ...]
    missing_step: str


class Arrivals:
    """The arrivals of the ranks: first the starts of their processes, then their calls of `init`.

    A program may never call `init`, so `limit_s` for this call begins when the first rank has called it. Without a
    clock: all calls pass the time. `is_over` means that all ranks have arrived.
    """

    def __init__(self, num_ranks: int, *, limit_s: float, now_s: float) -> None:
        self._ranks = range(num_ranks)
        self._limit_s = limit_s
        self._start_s = now_s
        self._first_init_s: float | None = None
        self._reported_steps: set[str] = set()  # values of `LateRanks.missing_step`
        self.is_over = False

    def find_late(self, *, now_s: float, started: Collection[int], called: Collection[int]) -> LateRanks | None:
        """Return the ranks that are late, or None. Each missing step is reported only once.

        `started` and `called` include ranks that have ended; `called` is empty until a rank has called `init`.
        """
        missing = tuple(rank for rank in self._ranks if rank not in started)
        if missing:
            return self._report_once(LateRanks(missing, "start"), now_s - self._start_s)
        # All processes have started, so only calls of init() can be missing.
        missing = tuple(rank for rank in self._ranks if rank not in called)
        self.is_over = not missing
        if called and missing:
            self._first_init_s = now_s if self._first_init_s is None else self._first_init_s
            return self._report_once(LateRanks(missing, "call hvd.init()"), now_s - self._first_init_s)
        return None

    def _report_once(self, late: LateRanks, waited_s: float) -> LateRanks | None:
        """Return `late`; None before the limit, or if this step was reported before."""
        if late.missing_step in self._reported_steps or waited_s < self._limit_s:
            return None
        self._reported_steps.add(late.missing_step)
        return late
