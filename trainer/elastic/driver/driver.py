"""Runs an elastic job: does what `membership` decides, and tells it what happens.

One thread decides and acts, on one queue of events. Other threads only wait for something and put it there.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datasvc.trainer.elastic.driver.actions import (
    Action,
    Announce,
    Break,
    Finish,
    Say,
    Seated,
    Start,
    Stop,
    StopWorker,
)
from datasvc.trainer.elastic.driver.discovery import Discovery
from datasvc.trainer.elastic.driver.limits import plan_limits, read_discovery_interval_s
from datasvc.trainer.elastic.driver.membership import JobMembership
from datasvc.trainer.elastic.driver.worker_start import plan_worker_start
from datasvc.trainer.launch.ranks.job import ElasticOptions, Host, JobFailure, LaunchJob
from datasvc.trainer.launch.ranks.rank_group import RankGroup
from datasvc.trainer.launch.ranks.rank_process import RankEnd, RankProcess
from datasvc.trainer.launch.ranks.remote_shell import is_local
from datasvc.trainer.launch.ranks.store import LOOPBACK, open_listener, serve_store
from datasvc.trainer.rendezvous.messages import (
    END_OF_QUEUE,
    WORDS_QUEUE,
    Ask,
    Leave,
    answer_key,
    broken_key,
    decode_word,
    encode,
    notice_queue,
    training_key,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported

_JOIN_TIMEOUT_S = 30.0

Event = Callable[[], list[Action]]


@dataclass(frozen=True)
class ElasticFailure:
    """Why an elastic job did not end well."""

    exit_status: int
    reason: str
    worker: str | None = None
    rank: int | None = None
    last_lines: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def describe(self) -> str:
        """Which worker failed first, if one did, how, what happened to others, and the end of its output."""
        others = [f"  {other}" for other in self.others]
        if self.worker is None:
            return "\n".join([self.reason, *others])
        name = f"worker {self.worker}" if self.rank is None else f"rank {self.rank} (worker {self.worker})"
        text = f"{name} was the first to fail: it {self.reason}"
        return "\n".join([text, *others, *(f"  [{self.worker}] {line}" for line in self.last_lines)])


def run_elastic_job(job: LaunchJob, options: ElasticOptions, environ: Mapping[str, str]) -> JobFailure | None:
    """Runs a job whose ranks may come and go, to its end. A signal to the launcher ends it.

    Returns:
        None if the last ranks ended with status 0.

    Raises:
        OSError: no port can be had.
        ValueError: the numbers of ranks or a setting in the environment make no sense.
    """
    limits = plan_limits(job, options, environ)
    interval_s = read_discovery_interval_s(environ)
    hosts = job.hosts or (Host("localhost", job.num_ranks),)
    is_here = options.discovery_script is None and all(is_local(host.name, environ) for host in hosts)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(open_listener(job.num_ranks, for_other_hosts=not is_here))
        group = stack.enter_context(RankGroup(grace_s=job.grace_s))
        membership = JobMembership(limits, now_s=time.monotonic())
        driver = _Driver(job, environ, membership, group, listener, is_here=is_here)
        stack.enter_context(_ending_on_signals(driver))
        if options.discovery_script is None:
            driver.find_hosts(hosts)
        else:
            discovery = Discovery(
                options.discovery_script,
                default_slots=options.slots_per_host or 1,
                interval_s=interval_s,
                on_hosts=driver.find_hosts,
                on_error=driver.complain,
            )
            stack.enter_context(discovery)
        return driver.run()


class _Driver:
    def __init__(
        self,
        job: LaunchJob,
        environ: Mapping[str, str],
        membership: JobMembership,
        group: RankGroup,
        listener: socket.socket,
        *,
        is_here: bool,
    ) -> None:
        self._job = job
        self._environ = environ
        self._membership = membership
        self._group = group
        self._listener = listener
        self._is_here = is_here
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._store: TCPStore | None = None
        self._ranks: dict[str, int] = {}
        self._slots: dict[str, int] = {}
        self._last_lines: dict[str, tuple[str, ...]] = {}
        self._finish: Finish | None = None
        self._words_thread = threading.Thread(target=self._hear_words, name="elastic-words", daemon=True)

    def find_hosts(self, hosts: tuple[Host, ...]) -> None:
        """These are all hosts now. From any thread, as the methods below up to `run`."""

        def event() -> list[Action]:
            self._slots = {host.name: host.num_slots for host in hosts}
            return self._membership.hosts_found(hosts, time.monotonic())

        self._events.put(event)

    def complain(self, text: str) -> None:
        """Discovery has failed."""
        self._events.put(lambda: [Say(f"host discovery: {text}; it is asked again")])

    def interrupt(self, number: int) -> None:
        """The launcher got a signal; the ranks get it too. Safe in a signal handler."""
        # First, so that no rank that ends of it is taken for one that died.
        self._events.put(lambda: [Finish(128 + number, f"ended by {signal.Signals(number).name}")])
        self._group.pass_on(number)

    def run(self) -> ElasticFailure | None:
        """Serves events until the job is over."""
        threading.Thread(target=self._hear_ends, name="elastic-ends", daemon=True).start()
        while self._finish is None:
            for action in self._next_event()():
                self._do(action)
            if self._store is None and self._group.processes and self._finish is None:
                # Only now, because torch takes seconds to load: the workers' own imports run meanwhile.
                self._store = self._open_store()
        if self._store is not None:
            self._store.queue_push(WORDS_QUEUE, END_OF_QUEUE)
            # An interpreter that ends while a thread is inside the store aborts.
            self._words_thread.join(_JOIN_TIMEOUT_S)
        return self._describe(self._finish)

    def _next_event(self) -> Event:
        now_s = time.monotonic()
        deadline_s = self._membership.next_deadline_s(now_s)
        try:
            return self._events.get(timeout=None if deadline_s is None else max(0.0, deadline_s - now_s))
        except queue.Empty:
            return lambda: self._membership.time_passed(time.monotonic())

    def _do(self, action: Action) -> None:
        match action:
            case Start():
                self._start(action)
            case Stop(worker):
                self._stop(worker)
            case Seated(worker, number, seat):
                self._ranks[worker] = seat.place.rank
                self._set(answer_key(worker, number), encode(seat))
            case StopWorker(worker, number, reason):
                self._set(answer_key(worker, number), encode(Leave(reason)))
            case Break(round_number, reason):
                self._set(broken_key(round_number), reason)
            case Announce(notice, workers):
                assert self._store is not None
                for worker in workers:
                    self._store.queue_push(notice_queue(worker), encode(notice))
            case Say(text):
                print(f"datasvc.trainer.launch: {text}", file=sys.stderr)  # noqa: T201 - for whoever started the job
            case Finish():
                self._finish = self._finish or action

    def _set(self, key: str, value: str) -> None:
        # Nobody has asked before there was a store, and who has not asked is told nothing.
        assert self._store is not None
        self._store.set(key, value)

    def _start(self, start: Start) -> None:
        others = [host for host in self._slots if not is_local(host, self._environ)]
        num_neighbours = self._slots.get(start.host, 1)
        if start.host not in others:
            num_neighbours = sum(slots for host, slots in self._slots.items() if host not in others)
        plan = plan_worker_start(
            start,
            self._job,
            self._environ,
            self._listener,
            num_neighbours=max(1, num_neighbours),
            other_hosts=None if self._is_here else others,
        )
        try:
            process = self._group.start(plan)
        except OSError as error:
            text = f"{start.worker} cannot be started: {error}"
            self._events.put(lambda: [Say(text), *self._ended(RankEnd(start.worker, 127, has_started=False))])
            return
        if process.has_come.is_set():
            self._note_coming(process)
        else:
            threading.Thread(target=self._await_coming, args=(process,), daemon=True).start()

    def _await_coming(self, process: RankProcess) -> None:
        process.has_come.wait()
        self._note_coming(process)

    def _note_coming(self, process: RankProcess) -> None:
        self._events.put(lambda: self._membership.worker_came(process.worker_id, time.monotonic()))

    def _stop(self, worker: str) -> None:
        process = self._group.processes.get(worker)
        if process is None:
            return
        process.begin_end(self._job.grace_s)
        timer = threading.Timer(self._job.grace_s, lambda: self._events.put(lambda: self._kill(worker)))
        timer.daemon = True
        timer.start()

    def _kill(self, worker: str) -> list[Action]:
        process = self._group.processes.get(worker)
        if process is not None and process.is_running:
            process.send(signal.SIGKILL)
        return []

    def _ended(self, end: RankEnd) -> list[Action]:
        process = self._group.processes.get(end.worker_id)
        trouble: str | None = None
        last_lines: tuple[str, ...] = ()
        if process is not None:
            trouble = process.trouble
            # What it has started goes with it, before another takes its slot.
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
            # Asked of the store, not told in a word of the worker's: that may come after the end of its process.
            is_training=self._store is not None and self._store.check([training_key(end.worker_id)]),
        )

    def _hear_ends(self) -> None:
        while self._finish is None:
            end = self._group.next_end(timeout_s=1.0)
            if end is not None:
                self._events.put(lambda end=end: self._ended(end))  # type: ignore[misc]  # a default binds it

    def _open_store(self) -> TCPStore:
        store = serve_store(self._listener)
        # A connection of its own, because one that waits answers nobody else.
        self._words_thread.start()
        return store

    def _hear_words(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported

        port = self._listener.getsockname()[1]
        store = TCPStore(LOOPBACK, port, is_master=False, timeout=dt.timedelta(days=1000))
        while (data := store.queue_pop(WORDS_QUEUE)) != END_OF_QUEUE:
            self._events.put(lambda data=data: self._heard(data))  # type: ignore[misc]  # see above

    def _heard(self, data: bytes) -> list[Action]:
        word = decode_word(data)
        if isinstance(word, Ask):
            return self._membership.worker_asked(word, time.monotonic())
        return self._membership.script_failed(word, time.monotonic())

    def _describe(self, finish: Finish) -> ElasticFailure | None:
        if not finish.exit_status:
            return None
        worker = finish.worker
        return ElasticFailure(
            finish.exit_status,
            finish.reason,
            worker,
            None if worker is None else self._ranks.get(worker),
            () if worker is None else self._last_lines.get(worker, ()),
            finish.others,
        )


@contextlib.contextmanager
def _ending_on_signals(driver: _Driver) -> Iterator[None]:
    """While inside, SIGINT and SIGTERM end the job; only a main thread can arrange that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    old = {number: signal.signal(number, lambda number, _: driver.interrupt(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
