"""A worker's side of an elastic job: asks the driver for a place in each round, and hears of changes.

Invariant: a process asks for one place at a time, after it has left its last round.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported
from torch.distributed.distributed_c10d import Store

from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.rendezvous.host_update import LeaveJob
from datasvc.trainer.rendezvous.messages import (
    END_OF_QUEUE,
    WORDS_QUEUE,
    Ask,
    Leave,
    Notice,
    RankAssignment,
    ScriptError,
    answer_key,
    broken_key,
    decode_answer,
    decode_notice,
    encode,
    notice_queue,
    training_key,
)
from datasvc.trainer.rendezvous.round_store import RoundStore

logger = logging.getLogger(__name__)

WORKER_VARIABLE = "TRAINER_ELASTIC_WORKER"
_FIRST_PAUSE_S = 0.002
_MAX_PAUSE_S = 0.1
_CONNECT_TIMEOUT_S = 60.0
_JOIN_TIMEOUT_S = 10.0


class Listener(Protocol):
    """Whoever is told of changes of hosts: an elastic state."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """See `State`; it must not block: the next notice waits for it."""


class Rendezvous:
    """What this process knows of its elastic job.

    Args:
        worker: its name, from the driver.
        store: a connection of its own to the driver's store.
    """

    def __init__(self, worker: str, store: Store) -> None:
        self.serial = 0
        self.wants_sync = True
        self.seat: RankAssignment | None = None
        self._worker = worker
        self._store = store
        self._round_store: Store | None = None
        self._num_asks = 0
        self._is_training = False
        # Guards the seat, the newest notice and the listeners: notices come in a thread of their own.
        self._lock = threading.Lock()
        self._notice = Notice()
        self._listeners: list[Listener] = []

    def join_round(self) -> RankAssignment:
        """Asks for a place in the next round and waits for it, however long the others take.

        Raises:
            LeaveJob: there is no place for this worker any more.
            RuntimeError: the driver is gone.
        """
        self._num_asks += 1
        if self._num_asks == 1:
            self._store.set(training_key(self._worker), "")
        self._say(Ask(self._worker, self._num_asks, self.serial, self.wants_sync))
        key = answer_key(self._worker, self._num_asks)
        pause_s = _FIRST_PAUSE_S
        # Asked in turns: a wait inside the store would be deaf to signals.
        while not self._store.check([key]):
            time.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _MAX_PAUSE_S)
        answer = decode_answer(self._store.get(key))
        if isinstance(answer, Leave):
            sys.stderr.write(f"this worker leaves the job: {answer.reason}\n")
            raise LeaveJob
        with self._lock:
            self.seat = answer
        return answer

    def round_store(self, seat: RankAssignment, *, timeout_s: float) -> Store:
        """The store through which the members of this round connect, and how long one waits for another there."""
        # Kept, because torch keeps no more of it than its C++ half: groups that are made later need the other too.
        self._round_store = RoundStore(
            self._store,
            prefix=f"trainer/{seat.round_number}",
            broken_key=broken_key(seat.round_number),
            timeout_s=timeout_s,
        )
        return self._round_store

    @contextlib.contextmanager
    def notifying(self, listener: Listener) -> Iterator[None]:
        """While inside, the listener is told of each change of hosts as soon as the driver says so."""
        with self._lock:
            self._listeners.append(listener)
        try:
            self.repeat_notice()
            yield
        finally:
            with self._lock:
                self._listeners.remove(listener)

    def repeat_notice(self) -> None:
        """Tells the listeners of the newest change of hosts once more, unless this round has it in it."""
        self._notify()

    def receive_notices(self, store: Store) -> None:
        """Passes changes of hosts on until the queue or the driver ends.

        Args:
            store: a connection of its own, because one that waits does nothing else.
        """
        # Without the driver there are no changes; who asks for a place next hears of that.
        with contextlib.suppress(RuntimeError):
            while (data := store.queue_pop(notice_queue(self._worker))) != END_OF_QUEUE:
                with self._lock:
                    self._notice = decode_notice(data)
                self._notify()

    def end_notices(self) -> None:
        """Makes `receive_notices` return."""
        with contextlib.suppress(RuntimeError):
            self._store.queue_push(notice_queue(self._worker), END_OF_QUEUE)

    def report_error(self, error: BaseException, *, ends_job: bool = False) -> None:
        """Tells the driver that this program ends with an error, and whether no other rank need go on."""
        # A driver that is gone needs no words, and the error itself must not be lost to another.
        with contextlib.suppress(RuntimeError):
            self._say(ScriptError(self._worker, f"{type(error).__name__}: {error}", ends_job))

    def begin_training(self) -> None:
        """Tells the driver that the training function runs. Raises RuntimeError: the driver is gone."""
        self._is_training = True
        self._store.set(training_key(self._worker), "")

    def end_training(self) -> None:
        """Tells the driver that the training function has returned; when this returns, the driver knows."""
        self._is_training = False
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(training_key(self._worker))

    def end_program(self) -> None:
        """Tells the driver that a program without a training function has come to its end."""
        if not self._is_training:
            self.end_training()

    def _notify(self) -> None:
        with self._lock:
            # A late notice may be in the round already: told then, it would end the round for nothing.
            if self.seat is None or self._notice.number <= self.seat.notice:
                return
            notice, listeners = self._notice, tuple(self._listeners)
        # Not under the lock: an override that waits would block the thread that joins the next round.
        for listener in listeners:
            try:
                listener.on_hosts_updated(notice.number, notice.result)
            except Exception:
                # A state may override it; the thread must live, for the changes that come later.
                logger.exception("on_hosts_updated has failed")

    def _say(self, word: Ask | ScriptError) -> None:
        self._store.queue_push(WORDS_QUEUE, encode(word))


def report_uncaught_errors(rendezvous: Rendezvous) -> None:
    """Tells the driver of an error that ends the main thread, wherever in the program; then goes on as before.

    Not of a `HorovodInternalError`: that is the loss of another rank, or was told already.
    """
    shown_by, pid = sys.excepthook, os.getpid()

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        # A child that was forked is not the rank.
        if not isinstance(error, HorovodInternalError) and os.getpid() == pid:
            rendezvous.report_error(error)
        shown_by(kind, error, traceback)

    sys.excepthook = report


_lock = threading.Lock()
_rendezvous: Rendezvous | None = None


def open_rendezvous(environ: Mapping[str, str]) -> Rendezvous | None:
    """This process's part in the elastic job that the environment names; None if it names none.

    Made once: later calls return the same.

    Raises:
        RuntimeError: the driver is out of reach.
    """
    global _rendezvous  # noqa: PLW0603 - a process is in one job
    with _lock:
        if _rendezvous is None and WORKER_VARIABLE in environ:
            store, notice_store = _connect(environ), _connect(environ)
            # Changes may be days apart.
            notice_store.set_timeout(dt.timedelta(days=1000))
            _rendezvous = Rendezvous(environ[WORKER_VARIABLE], store)
            report_uncaught_errors(_rendezvous)
            _start_notices(_rendezvous, notice_store)
        return _rendezvous


def _connect(environ: Mapping[str, str]) -> TCPStore:
    return TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=False,
        timeout=dt.timedelta(seconds=_CONNECT_TIMEOUT_S),
    )


def _start_notices(rendezvous: Rendezvous, store: Store) -> None:
    thread = threading.Thread(target=rendezvous.receive_notices, args=(store,), name="elastic-notices", daemon=True)
    thread.start()

    pid = os.getpid()

    def end() -> None:
        # A child that was forked has neither the thread nor a right to end the queue of the rank.
        if os.getpid() != pid:
            return
        rendezvous.end_program()
        # An interpreter that ends while a thread is inside the store may abort.
        rendezvous.end_notices()
        thread.join(_JOIN_TIMEOUT_S)

    atexit.register(end)


def current_rendezvous() -> Rendezvous | None:
    """What `open_rendezvous` made; None before, and outside an elastic job."""
    return _rendezvous
