"""A run that is told to end: SIGTERM of a scheduler, Ctrl-C of a person. It ends with a last commit, within a grace.

The signal is only noted; the run looks, saves, and leaves its loop. Should that take longer than the grace, the
process ends all the same, as the signal would have had it: whoever sent it will not wait for ever, and a save that is
not committed leaves nothing behind that anyone sees.
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
# A terminal and a launcher both pass the same Ctrl-C on.
_SAME_CTRL_C_S: Final = 2.0

_open: list[Preemption] = []
"""Those that take signals, oldest first."""


class Preemption:
    """Takes note of SIGTERM and Ctrl-C instead of ending at once. Close it to have them as they were.

    A second Ctrl-C, some time after the first, interrupts as usual: somebody wants it now. Of several at a time all
    take note. A forked child has the signals as they were.

    Args:
        grace_s: seconds after the first signal in which the process may end by itself; then it is ended.

    Attributes:
        received: the first signal that came; None: none did.

    Raises:
        ConfigError: this is not the main thread, which alone can take signals.
    """

    def __init__(self, grace_s: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "signals can be taken in the main thread only: open the model there, or without a grace"
            )
        self.received: int | None = None
        self._grace_s = grace_s
        self._received_s = 0.0
        self._pid, self._is_closed = os.getpid(), False
        # A handler must not start a thread: it may have interrupted the start of another.
        self._has_come, self._is_over = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="datasvc-grace", daemon=True).start()
        _open.append(self)
        self._previous: dict[int, Any] = {}
        for number in SIGNALS:
            self._previous[number] = signal.getsignal(number)
            signal.signal(number, self._note)

    @property
    def left_s(self) -> float:
        """Seconds of the grace that are left, at least 0; all of them before a signal."""
        if self.received is None:
            return self._grace_s
        return max(0.0, self._grace_s - (time.monotonic() - self._received_s))

    def close(self) -> None:
        """Let the signals do again what they did before; whoever was to be ended is not any more."""
        if self._is_closed:
            return
        self._is_over.set()
        self._has_come.set()
        self._let_go()

    def _let_go(self) -> None:
        self._is_closed = True
        _open.remove(self)
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            handler = self._before(number)
            # Another handler that was set since is not ours to take away; None was not set from Python.
            if signal.getsignal(number) == self._note and handler is not None:
                signal.signal(number, handler)

    def _before(self, number: int) -> Any:
        """Return what took the signal before, of what still takes signals."""
        handler = self._previous.get(number)
        while (owner := _owner(handler)) is not None and owner._is_closed:  # noqa: SLF001
            handler = owner._previous.get(number)  # noqa: SLF001
        return handler

    def _note(self, number: int, frame: FrameType | None) -> None:
        before = self._before(number)
        if self._is_closed or self._pid != os.getpid():
            # Whoever took the signals since has put this handler back, or a fork is just being made.
            _handle(before, number, frame)
            return
        if _owner(before) is not None:
            before(number, frame)
        now_s = time.monotonic()
        if self.received is None:
            self.received, self._received_s = number, now_s
            self._has_come.set()
        elif number == signal.SIGINT and now_s - self._received_s > _SAME_CTRL_C_S:
            signal.default_int_handler(number, frame)

    def _watch(self) -> None:
        """End a process that is overdue: its main thread may wait for what never comes, and would take no signal."""
        self._has_come.wait()
        if self._is_over.wait(self._grace_s) or self.received is None:
            return
        name = signal.Signals(self.received).name
        sys.stderr.write(f"{name} came {self._grace_s:g} s ago and the run goes on: what is not committed is lost\n")
        sys.stderr.flush()
        os._exit(128 + self.received)


def _owner(handler: Any) -> Preemption | None:
    """Return whose handler it is, if it is one of ours."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, Preemption) else None


def _handle(handler: Any, number: int, frame: FrameType | None) -> None:
    """Do with a signal what `handler` does, as `signal.getsignal` gave it."""
    if callable(handler):
        handler(number, frame)
    elif handler == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _forget_all() -> None:
    """Have a forked child end by signals: it has neither the run that looks for them nor the watch over the grace."""
    for preemption in reversed(list(_open)):
        preemption._let_go()  # noqa: SLF001


os.register_at_fork(after_in_child=_forget_all)
