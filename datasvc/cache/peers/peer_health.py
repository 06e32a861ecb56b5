"""Which peers are asked: one that fails is left alone for a growing while, one that lies for longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

_MAX_DOUBLINGS: Final = 16


@dataclass(frozen=True)
class PeerReport:
    """What became of the requests to one peer.

    Attributes:
        num_ok: objects that it gave bytes of and that were right.
        num_missing: objects that it does not have.
        num_failed: requests that it refused, or did not answer to the end and in time.
        num_lying: objects that it gave bytes of and that were wrong.
        bytes_received: of all of them.
    """

    num_ok: int = 0
    num_missing: int = 0
    num_failed: int = 0
    num_lying: int = 0
    bytes_received: int = 0


class _Streak:
    """Faults of one kind in a row, and how long they make us stay away: twice as long with each."""

    def __init__(self, first_pause_s: float, max_pause_s: float) -> None:
        self._first_pause_s, self._max_pause_s = first_pause_s, max_pause_s
        self.length = 0

    @property
    def pause_s(self) -> float:
        if not self.length:
            return 0.0
        return min(self._first_pause_s * 2.0 ** min(self.length - 1, _MAX_DOUBLINGS), self._max_pause_s)


class PeerHealth:
    """The record of one peer. Safe for threads.

    Args:
        clock: seconds that never run backwards.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = _Streak(first_pause_s=1, max_pause_s=60)
        self._lies = _Streak(first_pause_s=60, max_pause_s=3600)
        self._alone_until_s = clock()
        self._is_on_trial = False
        self._report = PeerReport()

    @property
    def report(self) -> PeerReport:
        """What happened until now."""
        return self._report

    def may_ask(self) -> bool:
        """Return whether to ask the peer now. Of many who would try it after a pause, one gets True."""
        with self._lock:
            if not (self._failures.length or self._lies.length):
                return True
            if self._clock() < self._alone_until_s:
                return False
            self._is_on_trial = True
            self._leave_alone()
            return True

    def received(self, num_bytes: int) -> None:
        """Count bytes, whatever they are worth."""
        with self._lock:
            self._report = replace(self._report, bytes_received=self._report.bytes_received + num_bytes)

    def missing(self) -> None:
        """The peer answered that it lacks the object: it is well."""
        with self._lock:
            self._report = replace(self._report, num_missing=self._report.num_missing + 1)
            self._failures.length = 0

    def failed(self) -> None:
        """The peer refused, stalled or broke off."""
        with self._lock:
            self._report = replace(self._report, num_failed=self._report.num_failed + 1)
            self._extend(self._failures)

    def judged(self, *, intact: bool) -> None:
        """The digest of an object that the peer gave bytes of was right, or not."""
        with self._lock:
            if intact:
                self._report = replace(self._report, num_ok=self._report.num_ok + 1)
                self._failures.length = self._lies.length = 0
            else:
                self._report = replace(self._report, num_lying=self._report.num_lying + 1)
                self._extend(self._lies)

    def _extend(self, streak: _Streak) -> None:
        # Eight threads that lose the same peer at the same time have seen one fault, not eight.
        if not streak.length or self._is_on_trial or self._clock() >= self._alone_until_s:
            streak.length += 1
            self._is_on_trial = False
        self._leave_alone()

    def _leave_alone(self) -> None:
        self._alone_until_s = self._clock() + max(self._failures.pause_s, self._lies.pause_s)
