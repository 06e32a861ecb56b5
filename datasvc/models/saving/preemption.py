"""Preemption: after SIGTERM from a scheduler, or Ctrl-C, a run saves once more and ends within a grace period.

The handler only records the signal. The run polls it (`CheckpointManager.should_save`), saves and leaves its loop. If
the run takes longer than the grace period, a thread ends the process with the signal's status, even if the run is
blocked. A save that is not committed by then leaves nothing visible.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, Final

from datasvc.errors import ConfigError

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
# A terminal and a launcher may both deliver the same Ctrl-C, so a second one within this time does not count.
_SAME_CTRL_C_S: Final = 2.0

_open: list[Preemption] = []
"""Open instances, oldest first."""


class Preemption:
    """Records SIGTERM and Ctrl-C instead of ending the process at once. `close` restores the previous handlers.

    A second Ctrl-C, more than two seconds after the first signal, raises KeyboardInterrupt as usual. If several
    instances are open, each of them records the signal. In a forked child, the previous handlers are restored.

    Args:
        grace_s: seconds from the first signal until a process that still runs is ended.

    Attributes:
        received: number of the first signal received; None: none so far.

    Raises:
        ConfigError: the calling thread is not the main thread; Python installs signal handlers there only.
    """

    def __init__(self, grace_s: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "signal handlers can be set in the main thread only: make the manager there, or without grace="
            )
        self.received: int | None = None
        self._grace_s = grace_s
        self._received_s = 0.0
        self._pid, self._is_closed = os.getpid(), False
        # Start the thread now: a signal handler must not start one, because it may interrupt the start of another.
        self._is_signalled, self._is_released = threading.Event(), threading.Event()
        threading.Thread(target=self._enforce_grace, name="datasvc-grace", daemon=True).start()
        _open.append(self)
        self._previous: dict[int, Any] = {}
        for number in SIGNALS:
            self._previous[number] = signal.getsignal(number)
            signal.signal(number, self._on_signal)

    @property
    def remaining_s(self) -> float:
        """Remaining seconds of the grace period, at least 0; before a signal, the whole period."""
        if self.received is None:
            return self._grace_s
        return max(0.0, self._grace_s - (time.monotonic() - self._received_s))

    def close(self) -> None:
        """Restore the previous handlers; a signal that was received before no longer ends the process."""
        if self._is_closed:
            return
        self._is_released.set()
        self._is_signalled.set()
        self._release()

    def _release(self) -> None:
        self._is_closed = True
        _open.remove(self)
        # Python sets handlers in the main thread only; the handler of a closed instance passes signals on.
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            handler = self._previous_handler(number)
            # Keep a handler that was installed after ours. None means a handler that was not set from Python.
            if signal.getsignal(number) == self._on_signal and handler is not None:
                signal.signal(number, handler)

    def _previous_handler(self, number: int) -> Any:
        """Return the handler that was installed before this instance; handlers of closed instances are skipped."""
        handler = self._previous.get(number)
        while (owner := _owner(handler)) is not None and owner._is_closed:  # noqa: SLF001
            handler = owner._previous.get(number)  # noqa: SLF001
        return handler

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous_handler(number)
        if self._is_closed or self._pid != os.getpid():
            # This instance was closed, but later code reinstalled its handler; or this is a child just forked.
            _call_handler(previous, number, frame)
            return
        if _owner(previous) is not None:
            previous(number, frame)
        now_s = time.monotonic()
        if self.received is None:
            self.received, self._received_s = number, now_s
            self._is_signalled.set()
        elif number == signal.SIGINT and now_s - self._received_s > _SAME_CTRL_C_S:
            signal.default_int_handler(number, frame)

    def _enforce_grace(self) -> None:
        """End a process that exceeds the grace period; its main thread may be blocked and never run a handler."""
        self._is_signalled.wait()
        if self._is_released.wait(self._grace_s) or self.received is None:
            return
        name = signal.Signals(self.received).name
        sys.stderr.write(
            f"{name} was received {self._grace_s:g} s ago and the run has not ended: the process exits now, "
            "uncommitted saves are lost\n"
        )
        sys.stderr.flush()
        os._exit(128 + self.received)


def _owner(handler: Any) -> Preemption | None:
    """Return the instance that this handler is a method of, None for any other handler."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, Preemption) else None


def _call_handler(handler: Any, number: int, frame: FrameType | None) -> None:
    """Do what `handler`, a value from `signal.getsignal`, does with a signal."""
    if callable(handler):
        handler(number, frame)
    elif handler == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _release_all() -> None:
    """Restore signal handling in a forked child: nothing there polls signals or enforces the grace period."""
    for preemption in reversed(list(_open)):
        preemption._release()  # noqa: SLF001


os.register_at_fork(after_in_child=_release_all)
