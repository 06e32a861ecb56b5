"""A worker's side of an elastic job: asks the driver for a place in each round, and hears of changes.

Invariant: a process asks for one place at a time, after it has left its last round.
"""

import contextlib
import datetime as dt
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported
from torch.distributed.distributed_c10d import Store

from trainer.elastic.messages import (
    HOSTS_KEY,
    WORDS_QUEUE,
    Ask,
    Leave,
    Notice,
    ScriptError,
    Seat,
    answer_key,
    broken_key,
    decode_answer,
    decode_notice,
    encode,
)
from trainer.elastic.round_store import RoundStore
from trainer.errors import HorovodInternalError

WORKER_VARIABLE = "TRAINER_ELASTIC_WORKER"
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.1
_CONNECT_TIMEOUT_S = 60.0


class Rendezvous:
    """What this process knows of its elastic job.

    Args:
        worker: its name, from the driver.
        store: a connection of its own to the driver's store.
    """

    def __init__(self, worker: str, store: Store) -> None:
        self.serial = 0
        self.wants_sync = True
        self.seat: Seat | None = None
        self._worker = worker
        self._store = store
        self._round_store: Store | None = None
        self._num_asks = 0

    def join_round(self) -> Seat:
        """Asks for a place in the next round and waits for it, however long the others take.

        Raises:
            SystemExit: there is no place for this worker any more; its status is 0.
            RuntimeError: the driver is gone.
        """
        self._num_asks += 1
        self._say(Ask(self._worker, self._num_asks, self.serial, self.wants_sync))
        key = answer_key(self._worker, self._num_asks)
        pause_s = _FIRST_PAUSE_S
        # Asked in turns: a wait inside the store would be deaf to signals.
        while not self._store.check([key]):
            time.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)
        answer = decode_answer(self._store.get(key))
        if isinstance(answer, Leave):
            sys.stderr.write(f"this worker leaves the job: {answer.reason}\n")
            raise SystemExit(0)
        self.seat = answer
        return answer

    def round_store(self, seat: Seat, *, timeout_s: float) -> Store:
        """The store through which the members of this round connect, and how long one waits for another there."""
        # Kept, because torch keeps no more of it than its C++ half: groups that are made later need the other too.
        self._round_store = RoundStore(
            self._store,
            prefix=f"trainer/{seat.round_number}",
            broken_key=broken_key(seat.round_number),
            timeout_s=timeout_s,
        )
        return self._round_store

    def read_notice(self) -> Notice | None:
        """The newest change of hosts that this round does not have in it, if there is one."""
        notice = decode_notice(self._store.get(HOSTS_KEY))
        is_news = self.seat is not None and notice.number > self.seat.notice
        return notice if is_news else None

    def report_error(self, error: BaseException) -> None:
        """Tells the driver that this program cannot go on, and why."""
        # A driver that is gone needs no words, and the error itself must not be lost to another.
        with contextlib.suppress(RuntimeError):
            self._say(ScriptError(self._worker, f"{type(error).__name__}: {error}"))

    def _say(self, word: Ask | ScriptError) -> None:
        self._store.queue_push(WORDS_QUEUE, encode(word))


def report_uncaught_errors(rendezvous: Rendezvous) -> None:
    """Tells the driver of an error that ends the main thread, wherever in the program; then goes on as before.

    Not of a ``HorovodInternalError``: that is the loss of another rank, or was told already.
    """
    shown_by = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not isinstance(error, HorovodInternalError):
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
            store = TCPStore(
                environ["MASTER_ADDR"],
                int(environ["MASTER_PORT"]),
                is_master=False,
                timeout=dt.timedelta(seconds=_CONNECT_TIMEOUT_S),
            )
            _rendezvous = Rendezvous(environ[WORKER_VARIABLE], store)
            report_uncaught_errors(_rendezvous)
        return _rendezvous


def current_rendezvous() -> Rendezvous | None:
    """What ``open_rendezvous`` made; None before, and outside an elastic job."""
    return _rendezvous
