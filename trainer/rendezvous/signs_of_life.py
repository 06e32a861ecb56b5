"""Which processes still run: each counts in the store of the job, and others look whether its count changes.

Only changes of a count are compared, by the clock of the process that looks: clocks of machines differ.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, Self

from torch.distributed.distributed_c10d import Store

from datasvc.trainer.rendezvous.messages import dropped_key

_LOG = logging.getLogger(__name__)

POLL_S: Final = 0.5  # between two counts and looks of a process


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
    """A thread that counts in the store as long as this process runs, and looks whether other processes count.

    A rank that has not begun to count is not watched yet. A thread counts also while the main thread computes.

    Args:
        store: store of the job; the thread has a connection of its own.
        rank: rank of this process.
        watched: ranks of the other processes.
        on_silent: called once with each rank whose count is older than `lost_after_s`, and with `rank` itself if
            another process has dropped it. Each call has a thread of its own, so it may wait.
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
        own: Any = store
        self._store: Store = own.clone()
        self._rank, self._on_silent, self._lost_after_s = rank, on_silent, lost_after_s
        self._watched = {each: SilenceTimer(2 * POLL_S) for each in watched}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="signs-of-life", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        # A thread inside the store when the interpreter ends aborts the process; the store may also be lost.
        self._thread.join(2 * POLL_S)

    def drop(self, rank: int) -> None:
        """Record that the job goes on without a rank, for this rank and for the launcher."""
        self._store.set(dropped_key(rank), "")

    @property
    def was_dropped(self) -> bool:
        """Whether another process has dropped this one."""
        with contextlib.suppress(RuntimeError):
            return self._store.check([dropped_key(self._rank)])
        return False

    def _watch(self) -> None:
        count, is_dropped = 0, False
        try:
            while not self._closed.is_set():
                count += 1
                self._store.set(_count_key(self._rank), str(count))
                for rank, silence in list(self._watched.items()):
                    key = _count_key(rank)
                    if not self._store.check([key]):
                        continue
                    if silence.look(self._store.get(key), time.monotonic()) > self._lost_after_s:
                        del self._watched[rank]
                        self._report(rank)
                if not is_dropped and (is_dropped := self._store.check([dropped_key(self._rank)])):
                    self._report(self._rank)
                self._closed.wait(POLL_S)
        except RuntimeError:
            _LOG.debug("rank %d no longer watches others: the store of the job is lost", self._rank, exc_info=True)

    def _report(self, rank: int) -> None:
        threading.Thread(target=self._on_silent, args=(rank,), daemon=True).start()


def _count_key(rank: int) -> str:
    return f"trainer/count/{rank}"
