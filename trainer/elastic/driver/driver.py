"""The driver of an elastic job: passes events to `membership` and executes the actions that it returns.

It runs in the launcher, and finds hosts by the user's discovery script. A worker is a process of the job; a round is
a period with a fixed assignment of ranks to workers. Invariant: one thread takes events from one queue and executes
the actions. Each other thread only waits, such as for a message, and puts an event into the queue.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import queue
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Self

from datasvc.trainer.elastic.driver.actions import (
    Action,
    Announce,
    AssignRank,
    Break,
    DenyRank,
    Finish,
    PrintMessage,
    Start,
    TerminateWorker,
    plan_worker_start,
)
from datasvc.trainer.elastic.driver.limits import plan_limits, read_discovery_interval_s
from datasvc.trainer.elastic.driver.membership import JobMembership
from datasvc.trainer.launch.ranks.hosts import is_local, parse_host_file
from datasvc.trainer.launch.ranks.job import ElasticOptions, Host, JobFailure, LaunchJob
from datasvc.trainer.launch.ranks.rank_group import RankGroup
from datasvc.trainer.launch.ranks.rank_output import print_message
from datasvc.trainer.launch.ranks.rank_process import RankEnd, RankProcess, StartError
from datasvc.trainer.launch.ranks.static_job import handling_signals
from datasvc.trainer.launch.ranks.store import LOOPBACK, open_listener, serve_store
from datasvc.trainer.rendezvous import messages

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


# Maximum wait for the message thread at the end of the job.
_JOIN_TIMEOUT_S = 30.0

# Handles an event: updates `membership`, and returns the actions that follow. Called by the driver's thread.
Event = Callable[[], list[Action]]


# A script that takes longer is assumed to hang, and is killed.
_SCRIPT_TIMEOUT_S = 60.0


def run_elastic_job(job: LaunchJob, options: ElasticOptions, environ: Mapping[str, str]) -> JobFailure | None:
    """Run an elastic job to its end. A signal to the launcher ends the job.

    Returns:
        None if the job succeeded: its last ranks exited with status 0.

    Raises:
        OSError: no port is available.
        ValueError: the numbers of ranks contradict each other, or a setting in the environment is invalid.
    """
    limits = plan_limits(job, options, environ)
    # A process that connects to the store by mistake, such as a port scanner, does not meet the keys of the job.
    environ = {**environ, messages.PREFIX_VARIABLE: secrets.token_hex(16)}
    interval_s = read_discovery_interval_s(environ)
    hosts = job.hosts or (Host("localhost", job.num_ranks),)
    # With a discovery script this is False, because the script may name other hosts later.
    is_single_machine = options.discovery_script is None and all(is_local(host.name, environ) for host in hosts)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(open_listener(job.num_ranks, for_other_hosts=not is_single_machine))
        group = stack.enter_context(RankGroup(grace_s=job.grace_s))
        membership = JobMembership(limits, now_s=time.monotonic())
        driver = _Driver(job, environ, membership, group, listener, is_single_machine=is_single_machine)
        stack.enter_context(handling_signals(driver.interrupt))
        stack.enter_context(handling_signals(group.notify, (signal.SIGUSR1, signal.SIGUSR2)))
        if options.discovery_script is None:
            driver.report_hosts(hosts)
        else:
            discovery = Discovery(
                options.discovery_script,
                default_slots=options.slots_per_host or 1,
                interval_s=interval_s,
                on_hosts=driver.report_hosts,
                on_error=driver.report_discovery_error,
            )
            stack.enter_context(discovery)
        return driver.run()


class _Driver:
    """The event loop of the driver: executes the actions of `membership`, and owns the job's store, a `TCPStore`."""

    def __init__(
        self,
        job: LaunchJob,
        environ: Mapping[str, str],
        membership: JobMembership,
        group: RankGroup,
        listener: socket.socket,
        *,
        is_single_machine: bool,
    ) -> None:
        self._job = job
        self._environ = environ
        self._membership = membership
        self._group = group
        self._listener = listener
        self._is_single_machine = is_single_machine
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._store: Store | None = None
        self._ranks: dict[str, int] = {}  # last rank of each worker
        self._slots: dict[str, int] = {}  # number of slots of each host; a slot is for one worker
        self._last_lines: dict[str, tuple[str, ...]] = {}  # end of the output of each worker that failed
        self._finish: Finish | None = None
        self._message_thread = threading.Thread(target=self._receive_messages, name="elastic-messages", daemon=True)

    def report_hosts(self, hosts: tuple[Host, ...]) -> None:
        """Report the complete list of hosts. Any thread may call this method and the next two."""

        def event() -> list[Action]:
            self._slots = {host.name: host.num_slots for host in hosts}
            return self._membership.hosts_found(hosts, time.monotonic())

        self._events.put(event)

    def report_discovery_error(self, text: str) -> None:
        """Report a failure of host discovery."""
        self._events.put(lambda: [PrintMessage(f"host discovery: {text}; the script runs again")])

    def interrupt(self, number: int) -> None:
        """End the job after a signal to the launcher, and forward the signal to the ranks; for signal handlers."""
        # Queued before the signal is sent: ranks that the signal ends must not count as failures. The status is that
        # of a shell: 128 plus the number of the signal.
        self._events.put(lambda: [Finish(128 + number, f"ended by {signal.Signals(number).name}")])
        self._group.forward_signal(number)

    def run(self) -> JobFailure | None:
        """Process events until the job ends."""
        threading.Thread(target=self._receive_ends, name="elastic-ends", daemon=True).start()
        while self._finish is None:
            for action in self._next_event()():
                self._execute(action)
            if self._store is None and self._group.processes and self._finish is None:
                # Opened after the workers have started, so that launcher and workers import torch in parallel.
                self._store = self._open_store()
        if self._store is not None:
            self._store.queue_push(messages.MESSAGE_QUEUE, messages.END_OF_QUEUE)
            # The interpreter aborts if it exits while a thread is inside the store.
            self._message_thread.join(_JOIN_TIMEOUT_S)
        return self._describe(self._finish)

    def _next_event(self) -> Event:
        """Wait for the next event. If a deadline of `membership` passes first, return that as an event."""
        deadline_s = self._membership.next_deadline_s()
        try:
            return self._events.get(timeout=None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            return lambda: self._membership.time_passed(time.monotonic())

    def _execute(self, action: Action) -> None:
        match action:
            case Start():
                self._start(action)
            case TerminateWorker(worker):
                self._begin_termination(worker)
            case AssignRank(worker, number, assignment):
                self._ranks[worker] = assignment.placement.rank
                self._set(messages.answer_key(worker, number), messages.encode(assignment))
            case DenyRank(worker, number, reason):
                self._set(messages.answer_key(worker, number), messages.encode(messages.Leave(reason)))
            case Break(round_number, reason):
                self._set(messages.broken_key(round_number), reason)
            case Announce(notice, workers):
                assert self._store is not None
                for worker in workers:
                    self._store.queue_push(messages.notice_queue(worker), messages.encode(notice))
            case PrintMessage(text):
                print_message(text)
            case Finish():
                self._finish = self._finish or action  # the first one counts

    def _set(self, key: str, value: str) -> None:
        # The store is open, because the driver sets keys only after requests, which arrive through the store.
        assert self._store is not None
        self._store.set(key, value)

    def _start(self, start: Start) -> None:
        other_hosts = [host for host in self._slots if not is_local(host, self._environ)]
        num_neighbours = self._slots.get(start.host, 1)
        if start.host not in other_hosts:
            # Several host names may mean this machine. The workers in all their slots share its processors.
            num_neighbours = sum(slots for host, slots in self._slots.items() if host not in other_hosts)
        plan = plan_worker_start(
            start,
            self._job,
            self._environ,
            self._listener,
            num_neighbours=max(1, num_neighbours),
            other_hosts=None if self._is_single_machine else other_hosts,
        )
        try:
            process = self._group.start(plan)
        except OSError as error:
            # 1, as in a job that is not elastic, if the program is not the cause, such as a full disk for output.
            status = error.exit_status if isinstance(error, StartError) else 1
            end, trouble = RankEnd(start.worker, status, has_started=False), f"was not started: {error}"
            self._events.put(lambda: self._handle_end(end, trouble))
            return
        if process.startup_done.is_set():
            self._report_start(process)
        else:
            # Another host may take long to start the process, and the driver's thread must not wait for it.
            threading.Thread(target=self._report_start, args=(process,), daemon=True).start()

    def _report_start(self, process: RankProcess) -> None:
        """Wait until the command has started, or cannot start, and queue the event."""
        process.startup_done.wait()
        self._events.put(lambda: self._membership.worker_started(process.worker_id, time.monotonic()))

    def _begin_termination(self, worker: str) -> None:
        """Begin to terminate a worker. A timer kills it if it still runs after the grace period."""
        process = self._group.processes.get(worker)
        if process is None:
            return
        process.begin_termination(self._job.grace_s)
        timer = threading.Timer(self._job.grace_s, lambda: self._events.put(lambda: self._kill(worker)))
        timer.daemon = True
        timer.start()

    def _kill(self, worker: str) -> list[Action]:
        process = self._group.processes.get(worker)
        if process is not None and process.is_running:
            process.send(signal.SIGKILL)
        return []

    def _handle_end(self, end: RankEnd, trouble: str | None = None) -> list[Action]:
        """Terminate the children of a worker that has ended, and pass the end to `membership`."""
        process = self._group.processes.get(end.worker_id)
        last_lines: tuple[str, ...] = ()
        if process is not None:
            trouble = process.trouble
            # The worker's children must end before another worker gets its slot.
            self._group.terminate([end.worker_id])
            if end.returncode:
                last_lines = self._last_lines[end.worker_id] = process.last_lines()
        return self._membership.worker_ended(
            end.worker_id,
            end.returncode,
            time.monotonic(),
            has_started=end.has_started,
            trouble=trouble,
            last_line=next((line for line in reversed(last_lines) if line.strip()), ""),
            # A key of the store, not a message, because a message might be handled only after this event.
            is_training=self._store is not None and self._store.check([messages.training_key(end.worker_id)]),
        )

    def _receive_ends(self) -> None:
        while self._finish is None:
            # With a timeout: after the job no process ends, and without one this thread would wait forever.
            end = self._group.next_end(timeout_s=1.0)
            if end is not None:
                self._events.put(lambda end=end: self._handle_end(end))  # type: ignore[misc]  # binds this `end`

    def _open_store(self) -> Store:
        tcp_store = serve_store(self._listener)  # first: it imports torch without garbage collection
        from torch.distributed.distributed_c10d import PrefixStore

        store = PrefixStore(self._environ[messages.PREFIX_VARIABLE], tcp_store)
        # The message thread has its own connection: a connection that waits for a message blocks all other calls.
        self._message_thread.start()
        return store

    def _receive_messages(self) -> None:
        from datasvc.trainer.rendezvous.rendezvous import connect

        address = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(self._listener.getsockname()[1])}
        store = connect({**self._environ, **address})
        # In effect infinite: a job may send no message for days.
        store.set_timeout(dt.timedelta(days=1000))
        # Only this driver ends its queue, after the job. An earlier end is handled as an invalid message.
        while (data := store.queue_pop(messages.MESSAGE_QUEUE)) != messages.END_OF_QUEUE or self._finish is None:
            self._events.put(lambda data=data: self._handle_message(data))  # type: ignore[misc]  # binds this `data`

    def _handle_message(self, data: bytes) -> list[Action]:
        try:
            message = messages.decode(data)
        except ValueError as error:
            return [PrintMessage(f"ignored a message in the store of the job: {error}")]
        if isinstance(message, messages.RankRequest):
            return self._membership.rank_requested(message, time.monotonic())
        if isinstance(message, messages.ScriptError):
            return self._membership.script_failed(message, time.monotonic())
        if isinstance(message, messages.SilentRanks):
            return self._membership.ranks_silent(message, time.monotonic())
        return [
            PrintMessage(
                f"ignored a message in the store of the job: {type(message).__name__} is none for the driver"
            )
        ]

    def _describe(self, finish: Finish) -> JobFailure | None:
        if not finish.exit_status:
            return None
        text, worker = finish.reason, finish.worker
        rank = None if worker is None else self._ranks.get(worker)
        if worker is not None:
            name = f"worker {worker}" if rank is None else f"rank {rank} (worker {worker})"
            text = f"{name} was the first to fail: it {finish.reason}"
        return JobFailure(
            exit_status=finish.exit_status,
            text="\n".join([text, *(f"  {other}" for other in finish.others)]),
            rank=rank,
            worker=worker,
            last_lines=() if worker is None else self._last_lines.get(worker, ()),
        )


class DiscoveryError(Exception):
    """The discovery script failed, or its output is not a list of hosts; the previous hosts stay valid."""


def run_discovery(script: str, *, default_slots: int, timeout_s: float = _SCRIPT_TIMEOUT_S) -> tuple[Host, ...]:
    """Run the script and return the hosts that it prints, as lines `host` or `host:slots`.

    Args:
        script: command line for a shell, usually a path.
        default_slots: number of slots (places of ranks) of a host whose line gives none.
        timeout_s: time after which the script and its children are killed.

    Raises:
        DiscoveryError: the script fails, takes too long, or does not print hosts.
    """
    process = subprocess.Popen(  # noqa: S602 - the user's own command line
        script,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A separate process group, so that the script can be killed with its children.
        process_group=0,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise DiscoveryError(f"'{script}' took longer than {timeout_s:g} s") from None
    finally:
        # The kill is safe: without a return code the process is not reaped, so no other group can have its number.
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        last_line = errors.strip().splitlines()[-1:] or ["it printed no error"]
        raise DiscoveryError(f"'{script}' exited with status {process.returncode}: {last_line[0]}")
    try:
        return parse_host_file(output, default_slots=default_slots)
    except ValueError as error:
        raise DiscoveryError(f"the output of '{script}' is not a list of hosts: {error}") from None


class Discovery:
    """Periodic host discovery in a background thread, as a context manager.

    Args:
        script, default_slots: see `run_discovery`.
        interval_s: seconds between the end of one run of the script and the start of the next.
        on_hosts: called from the thread with the hosts, after the first run and after each change.
        on_error: called from the thread with the message of a failure, unless it is that of the run before.
    """

    def __init__(
        self,
        script: str,
        *,
        default_slots: int,
        interval_s: float,
        on_hosts: Callable[[tuple[Host, ...]], None],
        on_error: Callable[[str], None],
    ) -> None:
        self._script = script
        self._default_slots = default_slots
        self._interval_s = interval_s
        self._on_hosts = on_hosts
        self._on_error = on_error
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-discovery", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The thread is not joined: a script that hangs must not delay the end of the job.
        self._stopped.set()

    def _run(self) -> None:
        previous_hosts: tuple[Host, ...] | None = None
        last_error: str | None = None
        while not self._stopped.is_set():
            try:
                hosts = run_discovery(self._script, default_slots=self._default_slots)
            except DiscoveryError as error:
                if str(error) != last_error:
                    last_error = str(error)
                    self._on_error(last_error)
            else:
                last_error = None
                if hosts != previous_hosts:
                    previous_hosts = hosts
                    self._on_hosts(hosts)
            self._stopped.wait(self._interval_s)
