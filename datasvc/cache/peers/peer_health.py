"""Health of a peer: after failures, requests to it pause for a growing time; after corrupt data, for longer.

Without these pauses, the timeouts of a failed peer would delay every object. `Peers` has one health for each peer;
`PeerSource` records the results of its requests there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

_logger = logging.getLogger(__name__)

_MAX_DOUBLINGS: Final = 16  # bounds the exponent; the pause has a separate maximum


@dataclass
class PeerReport:
    """Results of the requests to one peer.

    Attributes:
        num_ok: objects that contain bytes from the peer and have the right digest.
        num_missing: objects that the peer does not have.
        num_failed: requests that the peer refused, or did not complete in time.
        num_lying: objects that contain bytes from the peer and have a wrong digest.
        bytes_received: bytes from the peer, right or wrong.
    """

    num_ok: int = 0
    num_missing: int = 0
    num_failed: int = 0
    num_lying: int = 0
    bytes_received: int = 0


class _Streak:
    """Consecutive faults of one kind, and the pause that follows: each further fault doubles the pause."""

    def __init__(self, first_pause_s: float, max_pause_s: float) -> None:
        self._first_pause_s, self._max_pause_s = first_pause_s, max_pause_s
        self.length = 0

    @property
    def pause_s(self) -> float:
        if not self.length:
            return 0.0
        return min(self._first_pause_s * 2.0 ** min(self.length - 1, _MAX_DOUBLINGS), self._max_pause_s)


class PeerHealth:
    """Results of the requests to one peer, and whether to send the next one. Safe for threads.

    The first failure after a success, the first success after a failure, and all wrong bytes are logged.

    Args:
        clock: monotonic clock in seconds.
        name: name of the peer in the log.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, name: str = "") -> None:
        self._clock = clock
        self._name = name
        self._lock = threading.Lock()
        self._failures = _Streak(first_pause_s=1, max_pause_s=60)
        self._corruptions = _Streak(first_pause_s=60, max_pause_s=3600)
        self._paused_until_s = clock()
        # Whether a request is trying the peer after a pause. Its failure counts, although the next pause has begun.
        self._is_on_trial = False
        self._report = PeerReport()

    @property
    def report(self) -> PeerReport:
        """A copy of the results so far."""
        with self._lock:
            return replace(self._report)

    def may_request(self) -> bool:
        """Return whether to send the peer a request now. After a pause, one caller gets True and tries the peer."""
        with self._lock:
            if self._is_well():
                return True
            if self._clock() < self._paused_until_s:
                return False
            self._is_on_trial = True
            # The next pause begins at once, so that no other caller tries the peer before the result is known.
            self._pause()
            return True

    def record_bytes(self, num_bytes: int) -> None:
        """Count received bytes, right or wrong."""
        with self._lock:
            self._report.bytes_received += num_bytes

    def record_missing(self) -> None:
        """Record that the peer does not have an object, which is not a failure."""
        with self._lock:
            was_well = self._is_well()
            self._report.num_missing += 1
            # Corruptions stay counted: this answer proves nothing about the bytes that the peer sends.
            self._failures.length = 0
            is_back = not was_well and self._is_well()
        if is_back:
            self._log_back()

    def record_failure(self, reason: object = "a request failed") -> None:
        """Record a request that the peer refused or did not complete, and why."""
        with self._lock:
            was_well = self._is_well()
            self._report.num_failed += 1
            self._extend(self._failures)
        if was_well:
            _logger.warning("peer %s is lost: %s; other sources are used until it is back", self._name, reason)

    def record_integrity(self, *, intact: bool) -> None:
        """Record whether the digest of an object with bytes from the peer was right."""
        with self._lock:
            was_well = self._is_well()
            if intact:
                self._report.num_ok += 1
                self._failures.length = self._corruptions.length = 0
            else:
                self._report.num_lying += 1
                self._extend(self._corruptions)
        if not intact:
            _logger.warning("peer %s sent wrong bytes of an object; they are fetched from another source", self._name)
        elif not was_well:
            self._log_back()

    def _log_back(self) -> None:
        _logger.info("peer %s is back", self._name)

    # The next methods are called with the lock held.

    def _is_well(self) -> bool:
        return not (self._failures.length or self._corruptions.length)

    def _extend(self, streak: _Streak) -> None:
        """Add a fault, and begin its pause."""
        # The requests of several threads may fail at the same time, so failures during a pause add no fault. The
        # request that tries the peer again is an exception.
        if not streak.length or self._is_on_trial or self._clock() >= self._paused_until_s:
            streak.length += 1
            self._is_on_trial = False
        self._pause()

    def _pause(self) -> None:
        """Begin a pause now, or begin it again."""
        self._paused_until_s = self._clock() + max(self._failures.pause_s, self._corruptions.pause_s)
