"""A worker's connection to the driver of an elastic job, and the store through which the members of a round connect.

A round is a period with a fixed assignment of ranks. Invariant: a process has at most one request for a rank without
an answer, and sends a request only after it has left its last round.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

from torch.distributed import DistStoreError, TCPStore  # type: ignore[attr-defined]  # public, but not re-exported
from torch.distributed.distributed_c10d import PrefixStore, Store

from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.rendezvous import messages
from datasvc.trainer.rendezvous.messages import LeaveJob

logger = logging.getLogger(__name__)

# Pauses between two checks for an answer: the first one, and the maximum to which they double.
_FIRST_PAUSE_S = 0.002
_MAX_PAUSE_S = 0.1
_CONNECT_TIMEOUT_S = 60.0
# Maximum wait at exit for the end of the thread that receives notices.
_JOIN_TIMEOUT_S = 10.0

# Such as `State.on_hosts_updated`: gets the number of a change of hosts, and its `HostUpdateResult`. Must not block,
# because the thread that calls it also receives later notices, or begins the next round.
Listener = Callable[[float, int], None]


# Pauses between two checks in a wait: the first one, and the maximum to which they double.
_FIRST_CHECK_S = 0.001
_MAX_CHECK_S = 0.05


class Rendezvous:
    """The connection of this process to its elastic job.

    Attributes:
        serial, wants_sync: for the next `RankRequest`, which describes them; set by the run loop.
        multiple: for each `RankRequest`; set by a program whose model is divided over so many ranks, before `init`.
        assignment: newest rank assignment; None before the first.
    """

    def __init__(self, worker: str, store: Store) -> None:
        self.serial = 0
        self.wants_sync = True
        self.multiple = 1
        self.assignment: messages.RankAssignment | None = None
        self._worker = worker
        self._store = store
        self._round_store: Store | None = None
        self._num_requests = 0
        self._is_training = False
        # Guards the assignment, the newest notice and the listeners: a background thread receives the notices.
        self._lock = threading.Lock()
        self._notice = messages.Notice()
        self._listeners: list[Listener] = []

    def join_round(self) -> messages.RankAssignment:
        """Request a rank in the next round and wait for the answer, without a time limit.

        Raises:
            LeaveJob: there is no rank for this worker any more.
            RuntimeError: the driver cannot be reached.
        """
        self._num_requests += 1
        # The key means that training has not ended: the driver warns if a worker with this key exits with status 0.
        if self._num_requests == 1:
            self._store.set(messages.training_key(self._worker), "")
        request = messages.RankRequest(self._worker, self._num_requests, self.serial, self.wants_sync, self.multiple)
        self._send(request)
        key = messages.answer_key(self._worker, self._num_requests)
        pause_s = _FIRST_PAUSE_S
        # Poll, because Python cannot handle signals during a wait inside the store.
        while not self._store.check([key]):
            time.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _MAX_PAUSE_S)
        answer = messages.decode(self._store.get(key))
        if isinstance(answer, messages.Leave):
            sys.stderr.write(f"this worker leaves the job: {answer.reason}\n")
            raise LeaveJob
        assert isinstance(answer, messages.RankAssignment)
        with self._lock:
            self.assignment = answer
        return answer

    def round_store(self, assignment: messages.RankAssignment, *, timeout_s: float) -> Store:
        """Return the store through which the members of a round connect; `timeout_s` limits each wait in it."""
        # Keep the Python object alive: torch refers only to the C++ object, but later groups of the round need both.
        self._round_store = RoundStore(
            self._store,
            prefix=f"trainer/{assignment.round_number}",
            broken_key=messages.broken_key(assignment.round_number),
            timeout_s=timeout_s,
        )
        return self._round_store

    def watched_store(self, environ: Mapping[str, str]) -> RoundStore:
        """Return the store of the current round, over a new connection for a thread that watches other members."""
        assert self.assignment is not None, "a round has begun"
        number = self.assignment.round_number
        return RoundStore(
            connect(environ),
            prefix=f"trainer/{number}/watch",
            broken_key=messages.broken_key(number),
            timeout_s=_CONNECT_TIMEOUT_S,
        )

    @contextlib.contextmanager
    def notifying(self, listener: Listener) -> Iterator[None]:
        """Notify a listener of each change of hosts inside the block.

        At the beginning, notify it of the newest earlier change, unless the current round includes this change.
        """
        with self._lock:
            self._listeners.append(listener)
        try:
            self.repeat_notice()
            yield
        finally:
            with self._lock:
                self._listeners.remove(listener)

    def repeat_notice(self) -> None:
        """Notify the listeners of the newest change of hosts, unless the current round includes this change."""
        with self._lock:
            # A notice can arrive late: it must not end a round that includes the change already.
            if self.assignment is None or self._notice.number <= self.assignment.notice:
                return
            notice, listeners = self._notice, tuple(self._listeners)
        # Do not hold the lock here: a listener that waits would block the thread that joins the next round.
        for listener in listeners:
            try:
                listener(notice.number, notice.result)
            except Exception:
                # A user's `on_hosts_updated` may raise; the thread must survive that, to report later changes.
                logger.exception("on_hosts_updated has failed")

    def receive_notices(self, store: Store) -> None:
        """Notify the listeners of changes of hosts until the queue or the driver ends.

        Args:
            store: connection for this method alone, because its wait blocks all other calls on the connection.
        """
        # Ignore the loss of the driver here, because the next request for a rank raises an error.
        with contextlib.suppress(RuntimeError):
            while (data := store.queue_pop(messages.notice_queue(self._worker))) != messages.END_OF_QUEUE:
                try:
                    notice = messages.decode(data)
                except ValueError as error:
                    logger.warning("ignored: %s", error)
                    continue
                assert isinstance(notice, messages.Notice)
                with self._lock:
                    self._notice = notice
                self.repeat_notice()

    def end_notices(self) -> None:
        """Make `receive_notices` return."""
        with contextlib.suppress(RuntimeError):
            self._store.queue_push(messages.notice_queue(self._worker), messages.END_OF_QUEUE)

    def report_error(self, error: BaseException, *, ends_job: bool = False) -> None:
        """Report to the driver that this program exits with an error, and whether the job must end."""
        # A failure of the report must not hide the original error.
        with contextlib.suppress(RuntimeError):
            self._send(messages.ScriptError(self._worker, f"{type(error).__name__}: {error}", ends_job))

    def report_silent(self, round_number: int, ranks: Sequence[int]) -> None:
        """Report to the driver that ranks of a round do not answer: it ends their processes, if the round goes on."""
        # If the driver cannot be reached, the next request for a rank raises an error.
        with contextlib.suppress(RuntimeError):
            self._send(messages.SilentRanks(round_number, list(ranks)))

    def begin_training(self) -> None:
        """Report to the driver that the training function runs.

        Raises:
            RuntimeError: the driver cannot be reached.
        """
        self._is_training = True
        self._store.set(messages.training_key(self._worker), "")

    def end_training(self) -> None:
        """Report to the driver that the training function has returned; ignore a driver that cannot be reached."""
        self._is_training = False
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(messages.training_key(self._worker))

    def end_program(self) -> None:
        """Report to the driver that a program without a training function has finished."""
        if not self._is_training:
            self.end_training()

    def _send(self, message: messages.RankRequest | messages.ScriptError | messages.SilentRanks) -> None:
        self._store.queue_push(messages.MESSAGE_QUEUE, messages.encode(message))


def report_uncaught_errors(rendezvous: Rendezvous) -> None:
    """Install an exception hook that reports errors of the main thread to the driver, then calls the previous hook.

    A `HorovodInternalError` is not reported: its cause is the loss of another rank, or it has been reported already.
    """
    previous_hook, pid = sys.excepthook, os.getpid()

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        # A forked child is not the rank, so the driver gets no report of its errors.
        if not isinstance(error, HorovodInternalError) and os.getpid() == pid:
            rendezvous.report_error(error)
        previous_hook(kind, error, traceback)

    sys.excepthook = report


_lock = threading.Lock()
_rendezvous: Rendezvous | None = None


def open_rendezvous(environ: Mapping[str, str]) -> Rendezvous | None:
    """Return the connection to the elastic job that the environment names, the same each time; None if it names none.

    Raises RuntimeError: the driver cannot be reached.
    """
    global _rendezvous  # noqa: PLW0603 - a process is in one job
    with _lock:
        if _rendezvous is None and messages.WORKER_VARIABLE in environ:
            store, notice_store = connect(environ), connect(environ)
            # A timeout would end the thread that receives the notices, and hosts may not change for days.
            notice_store.set_timeout(dt.timedelta(days=1000))
            _rendezvous = Rendezvous(environ[messages.WORKER_VARIABLE], store)
            report_uncaught_errors(_rendezvous)
            _start_notices(_rendezvous, notice_store)
        return _rendezvous


def connect(environ: Mapping[str, str]) -> Store:
    """Return a new connection to the keys of the job in the driver's store."""
    store = TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=False,
        timeout=dt.timedelta(seconds=_CONNECT_TIMEOUT_S),
    )
    return PrefixStore(environ[messages.PREFIX_VARIABLE], store)


def _start_notices(rendezvous: Rendezvous, store: Store) -> None:
    """Start the thread that receives notices. At exit, end it, and report the end of the program."""
    thread = threading.Thread(target=rendezvous.receive_notices, args=(store,), name="elastic-notices", daemon=True)
    thread.start()

    pid = os.getpid()

    def end() -> None:
        # A forked child does not have the thread, and must not end the queue of the rank.
        if os.getpid() != pid:
            return
        rendezvous.end_program()
        # End the thread, because the interpreter may abort if it exits while a thread is inside the store.
        rendezvous.end_notices()
        thread.join(_JOIN_TIMEOUT_S)

    atexit.register(end)


def current_rendezvous() -> Rendezvous | None:
    """Return the object that `open_rendezvous` created; None before that, and outside an elastic job."""
    return _rendezvous


# With torch's own store, ranks that wait for the address of a dead rank would wait for the full timeout.


class RoundStore(Store):
    """A view of the job's store with a key prefix for the round; torch calls its methods to form process groups.

    If `broken_key` exists in the job's store, a member of the round is lost, and every wait fails.
    """

    def __init__(self, store: Store, *, prefix: str, broken_key: str, timeout_s: float) -> None:
        super().__init__()
        self._store = store
        self._prefixed_store = PrefixStore(prefix, store)
        self._broken_key = broken_key
        self._timeout = dt.timedelta(seconds=timeout_s)

    def find_broken(self) -> str:
        """Return which member of the round is lost, as the launcher reports it; empty if none is."""
        return self._store.get(self._broken_key).decode() if self._store.check([self._broken_key]) else ""

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        self._prefixed_store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for the key and return its value.

        Raises:
            HorovodInternalError: a member of the round is lost.
            DistStoreError: the timeout has expired.
        """
        self.wait([key])
        return bytes(self._prefixed_store.get(key))

    def add(self, key: str, amount: int) -> int:
        """Add to the number that is the value of a key, and return the sum; a missing key counts as 0."""
        return int(self._prefixed_store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._prefixed_store.check(list(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set the value of a key to `desired` if it is `expected`, as `torch.distributed.Store` does."""
        return bytes(self._prefixed_store.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it existed."""
        return bool(self._prefixed_store.delete_key(key))

    def num_keys(self) -> int:
        """Return the number of keys of all rounds."""
        return int(self._store.num_keys())

    def set_timeout(self, timeout: dt.timedelta) -> None:
        """Set the default limit of a wait for a key."""
        self._timeout = timeout

    def has_extended_api(self) -> bool:
        """Return False: `append` and the other extended methods are not implemented."""
        return False

    def wait(self, keys: Sequence[str], timeout: dt.timedelta | None = None) -> None:
        """Wait until the keys exist.

        Raises:
            HorovodInternalError: a member of the round is lost.
            DistStoreError: the timeout has expired, as in torch's own stores.
        """
        deadline_s = time.monotonic() + (timeout or self._timeout).total_seconds()
        pause_s = _FIRST_CHECK_S
        # Poll, because a wait inside the store would not end when a member is lost.
        while not self.check(keys):
            if self._store.check([self._broken_key]):
                raise HorovodInternalError(self._store.get(self._broken_key).decode())
            if time.monotonic() > deadline_s:
                raise DistStoreError(f"no other rank has set {', '.join(keys)} in time")
            time.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _MAX_CHECK_S)
