"""Saves in the background: one thread that does them in the order in which they were asked for.

A save that fails is said once: by the handle's result, or else to whoever asks for failures or waits, or else in the
log when the program ends. The program does not end before its saves have.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Final

from datasvc.errors import BusyError, ConfigError, DatasvcError, UnavailableError
from datasvc.repository import Resolved

logger = logging.getLogger(__name__)

OVERLAPS: Final = ("queue", "refuse")


class SaveHandle:
    """A save under way.

    Attributes:
        step: of the state.
        number: of the save among those of its saver, from 0; -1 before it was submitted.
        stall_s: seconds for which the call stopped the training until the thread had the save, without any wait for
            the commit; once `done`, with those that a device took to copy.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.number = -1
        self.stall_s = 0.0
        self._ended = threading.Event()
        self._version: Resolved | None = None
        self._error: BaseException | None = None
        self._was_told = False
        self._pid = os.getpid()

    def done(self) -> bool:
        """Return whether it is committed, or has failed."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until it is done; whether it failed is not told by this."""
        check_process(self._pid)
        self._ended.wait()

    @property
    def version(self) -> Resolved | None:
        """The version once it is committed; None before, and where it failed."""
        return self._version if self.done() else None

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None before it has. Whoever would be told of it is told all the same."""
        return self._error if self.done() else None

    def result(self, timeout: float | None = None) -> Resolved:
        """Wait for the commit; returns the version.

        Args:
            timeout: seconds; None: any number.

        Raises:
            UnavailableError: it has not ended in time, and goes on.
            DatasvcError: it failed, for which reason; nothing of it is visible.
        """
        check_process(self._pid)
        if not self._ended.wait(timeout):
            raise UnavailableError(f"the save of step {self.step} has not ended within {timeout:g} s, and goes on")
        if self._error is not None:
            self.mark_told()
            raise self._error
        assert self._version is not None
        return self._version

    def settle(self, version: Resolved | None, error: BaseException | None) -> None:
        """End; the saver calls this."""
        self._version, self._error = version, error
        self._ended.set()

    def mark_told(self) -> None:
        """Tell nobody else should it fail: somebody knows."""
        self._was_told = True

    def take_error(self) -> DatasvcError | None:
        """Return why it failed, named, unless somebody was told; who asks tells."""
        error = self._error
        if error is None or self._was_told:
            return None
        self.mark_told()
        kind = type(error) if isinstance(error, DatasvcError) else DatasvcError
        named = kind(f"the save of step {self.step} failed: {error}")
        named.__cause__ = error
        return named

    def __repr__(self) -> str:
        state = "under way" if not self.done() else str(self._version or f"failed: {self._error}")
        return f"SaveHandle(step {self.step}, {state})"


class Saver:
    """Runs saves one after the other, in a thread that lives while there are some.

    Args:
        limit: saves that may be under way at a time, with those that wait for their turn.
        overlap: what a save does while others are under way: "queue" waits where there are as many as may be,
            "refuse" raises as soon as there is one.

    Raises:
        ConfigError: no such `overlap`.
    """

    def __init__(self, *, limit: int, overlap: str) -> None:
        if overlap not in OVERLAPS:
            raise ConfigError(f"overlap is {overlap!r}; expected one of {', '.join(OVERLAPS)}")
        self._limit = limit
        self._overlap = overlap
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._under_way: deque[tuple[SaveHandle, Callable[[], Resolved]]] = deque()
        self._failed: deque[SaveHandle] = deque()
        self._num_submitted = 0
        self._is_running = False

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return bool(self._under_way)

    def check(self, step: int) -> None:
        """Say whether a save of `step` can be taken now.

        Raises:
            BusyError: an earlier one goes on, and overlap is refused.
            ConfigError: this process was forked from the one that made the saver.
        """
        check_process(self._pid)
        if self._overlap == "refuse" and self.is_busy:
            before = self._under_way[0][0].step
            raise BusyError(
                f"step {step} is not saved: the save of step {before} goes on; save less often, or let saves queue"
            )

    def take_failure(self) -> tuple[int, DatasvcError] | None:
        """Return number and reason of the first save that failed and nobody was told of; who asks tells."""
        while self._failed:
            handle = self._failed.popleft()
            error = handle.take_error()
            if error is not None:
                return handle.number, error
        return None

    def mark_told(self, numbers: Collection[int]) -> None:
        """Do not tell of these saves, which other ranks have told of; they may not have ended here."""
        for handle in [*(handle for handle, _ in list(self._under_way)), *list(self._failed)]:
            if handle.number in numbers:
                handle.mark_told()

    def wait_for_room(self) -> None:
        """Wait until there are fewer saves than the limit."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._under_way) < self._limit)

    def submit(self, handle: SaveHandle, work: Callable[[], Resolved]) -> None:
        """Let the thread call `work`, after what was submitted before."""
        with self._changed:
            handle.number, self._num_submitted = self._num_submitted, self._num_submitted + 1
            self._under_way.append((handle, work))
            _unfinished.add(self)
            if self._is_running:
                return
            self._is_running = True
        try:
            # The program does not wait for it by itself: `_finish_all` waits for what it has to do.
            threading.Thread(target=self._run, name="datasvc-save", daemon=True).start()
        except RuntimeError as error:
            # Other ranks save too, and would wait for this one.
            logger.warning("the save of step %d stops the training: %s", handle.step, error)
            self._run()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for all saves.

        Raises:
            UnavailableError: they have not ended within `timeout` seconds.
            DatasvcError: one failed, and nobody was told yet.
        """
        if not self.finish(timeout):
            steps = ", ".join(str(handle.step) for handle, _ in list(self._under_way))
            raise UnavailableError(f"the save of step {steps} has not ended within {timeout:g} s, and goes on")
        failure = self.take_failure()
        if failure is not None:
            raise failure[1]

    def finish_at_exit(self) -> None:
        """Wait for all saves, and put into the log why one failed that nobody was told of."""
        if self._pid != os.getpid():
            return
        self.finish()
        while (failure := self.take_failure()) is not None:
            logger.error("%s", failure[1])

    def finish(self, timeout: float | None = None) -> bool:
        """Wait for all saves, and tell of none; returns whether they have ended within `timeout` seconds.

        Raises ConfigError: this process was forked from the one that made the saver.
        """
        check_process(self._pid)
        with self._changed:
            return self._changed.wait_for(lambda: not self._under_way, timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._under_way:
                    self._is_running = False
                    if not self._failed:
                        _unfinished.discard(self)
                    return
                handle, work = self._under_way[0]
            version, failure = None, None
            try:
                version = work()
            except BaseException as error:  # noqa: BLE001 - handed to whoever asks
                failure = error
            del work
            with self._changed:
                handle.settle(version, failure)
                # Last: whoever looks for failures finds the reason, and whoever marks one as told finds the save.
                if failure is not None:
                    self._failed.append(handle)
                self._under_way.popleft()
                self._changed.notify_all()


def check_process(pid: int) -> None:
    """Raise ConfigError in a process other than `pid`, which has none of its threads."""
    if pid != os.getpid():
        raise ConfigError("this model was opened by the process that this one was forked from: open it here again")


_unfinished: set[Saver] = set()
"""Those with saves under way, or with a failure that may not have been told: they are kept from being forgotten."""


def _finish_all() -> None:
    for saver in list(_unfinished):
        saver.finish_at_exit()


# Exit handlers run after the threads of pools were ended, without which nothing can be stored. The last to register
# is the first to run, so the pools' own comes before.
if hasattr(threading, "_register_atexit"):
    import concurrent.futures.thread  # noqa: F401

    threading._register_atexit(_finish_all)  # noqa: SLF001
