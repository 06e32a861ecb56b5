"""Which processes still run: each counts in the store of the job, and others look whether its count changes.

Only changes of a count are compared, by the clock of the process that looks: clocks of machines differ.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, Self

from torch.distributed.distributed_c10d import Store

from datasvc.trainer.rendezvous.messages import dropped_key

_LOG = logging.getLogger(__name__)

POLL_S: Final = 0.5  # between two counts and looks of a process
# A store that does not answer for so many times `lost_after_s` is lost. It may be that of a launcher that a user has
# suspended, so wait longer than for a rank.
STORE_FACTOR: Final = 10
_ANSWER_S: Final = 5.0  # time in which a store that runs has answered the next questions


class SilenceTimer:
    """Measures how long a value has not changed, by looks at it.

    The time between two looks counts as at most `max_gap_s`: while the process that looks was stopped, or another of
    its threads did not release the interpreter, it could not see a change.
    """

    def __init__(self, max_gap_s: float = 2 * POLL_S) -> None:
        self._max_gap_s = max_gap_s
        self._value: object = None
        self._looked_s = 0.0
        self._silent_s = 0.0

    def look(self, value: object, now_s: float) -> float:
        """Return for how many seconds `value` has been the same at `now_s`, on a monotonic clock."""
        is_same = value == self._value
        self._silent_s = self._silent_s + min(now_s - self._looked_s, self._max_gap_s) if is_same else 0.0
        self._value, self._looked_s = value, now_s
        return self._silent_s


class SignsOfLife:
    """Threads that count in the store as long as this process runs, and look whether other processes count.

    A rank that has not begun to count is not watched yet. The threads count also while the main thread computes.

    Args:
        store: store of the job; the thread has a connection of its own.
        rank: rank of this process.
        watched: ranks of the other processes.
        on_silent: called once with each rank whose count is older than `lost_after_s`, and with `rank` itself if
            another process has dropped it; with rank 0, whose machine usually has the store, if the store does not
            answer for `STORE_FACTOR` times as long. Each call has a thread of its own, so it may wait.
        lost_after_s: seconds without a sign of life after which a rank is silent.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        watched: Iterable[int],
        on_silent: Callable[[int], None],
        *,
        lost_after_s: float,
    ) -> None:
        shared: Any = store
        self._shared_store = shared
        self._store: Store = shared.clone()
        self._rank, self._on_silent, self._lost_after_s = rank, on_silent, lost_after_s
        self._watched = {each: SilenceTimer(2 * POLL_S) for each in watched}
        self._closed = threading.Event()
        self._looked = threading.Condition()
        self._num_looks = 0
        self._is_dropped = False
        targets = (self._watch,) if rank == 0 else (self._watch, self._watch_store)
        self._threads = [threading.Thread(target=target, name="signs-of-life", daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        # A thread inside the store when the interpreter ends aborts the process; the store may also be lost.
        self._threads[0].join(2 * POLL_S)

    def drop(self, rank: int) -> None:
        """Record that the job goes on without a rank, for this rank and for the launcher."""
        self._store.set(dropped_key(rank), "")

    @property
    def was_dropped(self) -> bool:
        """Whether another process has dropped this one; False too if the store does not answer within seconds."""
        with self._looked:
            # A look may be under way that has not seen it.
            target = self._num_looks + 2
            if not self._closed.is_set():
                self._looked.wait_for(lambda: self._is_dropped or self._num_looks >= target, _ANSWER_S)
            return self._is_dropped

    def _watch(self) -> None:
        failed_look = -1
        while not self._closed.is_set():
            try:
                self._look()
            except RuntimeError as error:
                # Only this connection may be lost, and a process that does not count is dropped.
                if failed_look != self._num_looks:
                    _LOG.warning("rank %d connects to the store of the job again: %s", self._rank, error)
                failed_look = self._num_looks
                self._reconnect()
            self._closed.wait(POLL_S)

    def _look(self) -> None:
        self._store.set(_count_key(self._rank), str(self._num_looks))
        for rank, silence in list(self._watched.items()):
            key = _count_key(rank)
            if not self._store.check([key]):
                continue
            if silence.look(self._store.get(key), time.monotonic()) > self._lost_after_s:
                del self._watched[rank]
                self._report(rank)
        is_dropped = self._store.check([dropped_key(self._rank)])
        if is_dropped and not self._is_dropped:
            self._report(self._rank)
        with self._looked:
            self._is_dropped = is_dropped
            self._num_looks += 1
            self._looked.notify_all()

    def _reconnect(self) -> None:
        try:
            self._store = self._shared_store.clone()
        except RuntimeError:
            _LOG.debug("rank %d does not reach the store of the job", self._rank, exc_info=True)

    def _watch_store(self) -> None:
        """Report rank 0 if the other thread waits for the store."""
        silence, limit_s = SilenceTimer(2 * POLL_S), STORE_FACTOR * self._lost_after_s
        while not self._closed.wait(POLL_S):
            if silence.look(self._num_looks, time.monotonic()) > limit_s:
                self._report(0)
                return

    def _report(self, rank: int) -> None:
        threading.Thread(target=self._on_silent, args=(rank,), daemon=True).start()


def silent_server(lost_after_s: float) -> str:
    """Return the error of a process that has no sign of life of server 0."""
    return f"server 0 (rank 0) is lost, without a sign of life for {lost_after_s:g} s"


def _count_key(rank: int) -> str:
    return f"trainer/count/{rank}"
