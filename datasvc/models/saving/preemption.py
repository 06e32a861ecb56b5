"""Preemption: after SIGTERM from a scheduler, or Ctrl-C, a run saves once more and ends within a grace period.

`CheckpointManager` opens a `Preemption` if its argument `grace` is set. The signal handler only records the signal.
The run polls `CheckpointManager.should_save`, saves and leaves its loop. If the run takes longer than the grace
period, a thread ends the process with the exit status 128 + signal number, even if the run is blocked. A save that is
not committed by then is never visible.
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

_open_instances: list[Preemption] = []
"""Instances that are not closed, oldest first."""


class Preemption:
    """Records SIGTERM and Ctrl-C instead of ending the process at once. `close` restores the previous handlers.

    A Ctrl-C more than two seconds after the first signal raises KeyboardInterrupt as usual. If several instances are
    open, each of them records the signal. In a forked child, the previous handlers are restored.

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
        self._received_s = 0.0  # time of the first signal, by `time.monotonic`
        self._pid, self._is_closed = os.getpid(), False
        self._grace_began, self._grace_cancelled = threading.Event(), threading.Event()
        # Start the thread now: a signal handler must not start one, because it may interrupt the start of another.
        threading.Thread(target=self._enforce_grace, name="datasvc-grace", daemon=True).start()
        _open_instances.append(self)
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
        # End the thread. Cancel first: when `_grace_began` wakes the thread, it must find `_grace_cancelled` set.
        self._grace_cancelled.set()
        self._grace_began.set()
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        """Mark this instance as closed and restore the previous handlers."""
        self._is_closed = True
        _open_instances.remove(self)
        # Python sets handlers in the main thread only. Elsewhere this handler stays installed, and passes signals on.
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            handler = self._previous_handler(number)
            # Keep a handler that was installed after ours. `handler` is None if the previous handler was not set from
            # Python; `signal.signal` cannot set it again.
            if signal.getsignal(number) == self._on_signal and handler is not None:
                signal.signal(number, handler)

    def _previous_handler(self, number: int) -> Any:
        """Return the handler that was installed before this instance, without handlers of closed instances."""
        handler = self._previous.get(number)
        while (owner := _instance_of(handler)) is not None and owner._is_closed:  # noqa: SLF001
            handler = owner._previous.get(number)  # noqa: SLF001
        return handler

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous_handler(number)
        if self._is_closed or self._pid != os.getpid():
            # The handler of a closed instance is still installed, or other code has installed it again; or this
            # process was just forked.
            _call_handler(previous, number, frame)
            return
        # An older open instance records the signal too. Other handlers are not called: they could end the run.
        if _instance_of(previous) is not None:
            previous(number, frame)
        now_s = time.monotonic()
        if self.received is None:
            self.received, self._received_s = number, now_s
            self._grace_began.set()
        elif number == signal.SIGINT and now_s - self._received_s > _SAME_CTRL_C_S:
            signal.default_int_handler(number, frame)

    def _enforce_grace(self) -> None:
        """End a process that exceeds the grace period; its main thread may be blocked and never run a handler."""
        self._grace_began.wait()
        if self._grace_cancelled.wait(self._grace_s) or self.received is None:
            return
        name = signal.Signals(self.received).name
        sys.stderr.write(
            f"{name} was received {self._grace_s:g} s ago and the run has not ended: the process exits now, "
            "uncommitted saves are lost\n"
        )
        sys.stderr.flush()
        os._exit(128 + self.received)


def _instance_of(handler: Any) -> Preemption | None:
    """Return the instance whose `_on_signal` this handler is, None for any other handler."""
    instance = getattr(handler, "__self__", None)
    return instance if isinstance(instance, Preemption) else None


def _call_handler(handler: Any, number: int, frame: FrameType | None) -> None:
    """Handle a signal by a result of `signal.getsignal`: a function, SIG_DFL, SIG_IGN or None."""
    if callable(handler):
        handler(number, frame)
    elif handler == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _restore_all_handlers() -> None:
    """Restore signal handling in a forked child: nothing there polls signals or enforces the grace period."""
    for preemption in reversed(list(_open_instances)):
        preemption._restore_handlers()  # noqa: SLF001


os.register_at_fork(after_in_child=_restore_all_handlers)
