"""Queue of background saves: one thread runs them in the order of submission.

The error of a failed save is reported once: by the handle's `result`, else by the next `wait` or request for
failures, else in the log at exit. The process does not exit before its saves have ended.
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
from datasvc.threads import run_before_threads_end

logger = logging.getLogger(__name__)

OVERLAPS: Final = ("queue", "refuse")


class SaveHandle:
    """A background save.

    Attributes:
        step: step of the state.
        number: position among the saves of its queue, from 0; -1 before submission.
        stall_s: seconds for which the call stopped the training until the save was queued, without a wait for the
            commit; once `done`, plus the seconds for which a device copied.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.number = -1
        self.stall_s = 0.0
        self._ended = threading.Event()
        self._version: Resolved | None = None
        self._error: BaseException | None = None
        self._is_reported = False
        self._pid = os.getpid()

    def done(self) -> bool:
        """Return whether the save is committed or has failed."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until the save has ended. A failure is neither raised nor marked as reported."""
        check_process(self._pid)
        self._ended.wait()

    @property
    def version(self) -> Resolved | None:
        """The committed version; None before the commit and after a failure."""
        return self._version if self.done() else None

    @property
    def error(self) -> BaseException | None:
        """Error of a failed save, else None. Reading it does not mark the failure as reported."""
        return self._error if self.done() else None

    def result(self, timeout: float | None = None) -> Resolved:
        """Wait for the commit and return the version.

        Args:
            timeout: seconds; None: no limit.

        Raises:
            UnavailableError: the save has not ended in time; it continues.
            DatasvcError: the save failed; no version was committed.
        """
        check_process(self._pid)
        if not self._ended.wait(timeout):
            raise UnavailableError(f"the save of step {self.step} has not ended within {timeout:g} s, and goes on")
        if self._error is not None:
            self.mark_reported()
            raise self._error
        assert self._version is not None
        return self._version

    def settle(self, version: Resolved | None, error: BaseException | None) -> None:
        """Set the outcome; called by the queue."""
        self._version, self._error = version, error
        self._ended.set()

    def mark_reported(self) -> None:
        """Mark a failure as already reported; it is not raised or logged again."""
        self._is_reported = True

    def take_unreported_error(self) -> DatasvcError | None:
        """Return the error of an unreported failure, prefixed with the step, and mark it as reported."""
        error = self._error
        if error is None or self._is_reported:
            return None
        self.mark_reported()
        kind = type(error) if isinstance(error, DatasvcError) else DatasvcError
        described = kind(f"the save of step {self.step} failed: {error}")
        described.__cause__ = error
        return described

    def __repr__(self) -> str:
        state = "under way" if not self.done() else str(self._version or f"failed: {self._error}")
        return f"SaveHandle(step {self.step}, {state})"


class SaveQueue:
    """Runs saves one after the other, in a thread that exists while there are saves.

    Args:
        limit: largest number of saves that are queued or running.
        overlap: behaviour of a save while others are running: "queue" waits while `limit` saves are queued or
            running, "refuse" raises if there is any.

    Raises:
        ConfigError: `overlap` is neither "queue" nor "refuse".
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
        """Whether a save is queued or running."""
        return bool(self._under_way)

    def check(self, step: int) -> None:
        """Check that a save of `step` may be submitted now.

        Raises:
            BusyError: an earlier save is running, and `overlap` is "refuse".
            ConfigError: this process was forked from the one that made the queue.
        """
        check_process(self._pid)
        if self._overlap == "refuse" and self.is_busy:
            before = self._under_way[0][0].step
            raise BusyError(
                f"step {step} is not saved: the save of step {before} goes on; save less often, or use overlap=queue"
            )

    def take_unreported_failure(self) -> tuple[int, DatasvcError] | None:
        """Return number and error of the first unreported failure, and mark it as reported; None: there is none."""
        while self._failed:
            handle = self._failed.popleft()
            error = handle.take_unreported_error()
            if error is not None:
                return handle.number, error
        return None

    def mark_reported(self, numbers: Collection[int]) -> None:
        """Mark saves whose failure another rank has reported; they may not have ended on this rank yet."""
        for handle in [*(handle for handle, _ in list(self._under_way)), *list(self._failed)]:
            if handle.number in numbers:
                handle.mark_reported()

    def wait_for_slot(self) -> None:
        """Wait until fewer than `limit` saves are queued or running."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._under_way) < self._limit)

    def submit(self, handle: SaveHandle, work: Callable[[], Resolved]) -> None:
        """Queue `work` behind the saves that were submitted before."""
        with self._changed:
            handle.number, self._num_submitted = self._num_submitted, self._num_submitted + 1
            self._under_way.append((handle, work))
            _unfinished.add(self)
            if self._is_running:
                return
            self._is_running = True
        try:
            # A daemon thread: the interpreter does not join it. `_finish_all` waits for its saves at exit.
            threading.Thread(target=self._run, name="datasvc-save", daemon=True).start()
        except RuntimeError as error:
            # The system has no thread left. The other ranks wait for this save, so it runs in the calling thread.
            logger.warning("the save of step %d stops the training: %s", handle.step, error)
            self._run()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for all saves.

        Raises:
            UnavailableError: a save has not ended within `timeout` seconds.
            DatasvcError: a save failed and its error was not reported yet.
        """
        if not self.finish(timeout):
            steps = ", ".join(str(handle.step) for handle, _ in list(self._under_way))
            raise UnavailableError(f"the save of step {steps} has not ended within {timeout:g} s, and goes on")
        failure = self.take_unreported_failure()
        if failure is not None:
            raise failure[1]

    def finish_at_exit(self) -> None:
        """Wait for all saves, then log the failures that were not reported."""
        if self._pid != os.getpid():
            return
        self.finish()
        while (failure := self.take_unreported_failure()) is not None:
            logger.error("%s", failure[1])

    def finish(self, timeout: float | None = None) -> bool:
        """Wait for all saves without reporting failures; return whether they ended within `timeout` seconds.

        Raises ConfigError: this process was forked from the one that made the queue.
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
            except BaseException as error:  # noqa: BLE001 - raised by `result`, `wait` or the next save
                failure = error
            del work
            with self._changed:
                handle.settle(version, failure)
                # After `settle`, so that a listed failure has its error; before `popleft`, so that `mark_reported`
                # finds it.
                if failure is not None:
                    self._failed.append(handle)
                self._under_way.popleft()
                self._changed.notify_all()


def check_process(pid: int) -> None:
    """Raise ConfigError in a process other than `pid`: a forked child has none of the threads of its parent."""
    if pid != os.getpid():
        raise ConfigError("this manager was made in the parent of this forked process; make a new one in the child")


_unfinished: set[SaveQueue] = set()
"""Queues with running saves or unreported failures; the references keep them alive until exit."""


def _finish_all() -> None:
    for queue in list(_unfinished):
        queue.finish_at_exit()


# A save needs the thread pools that the exit shuts down.
run_before_threads_end(_finish_all)
