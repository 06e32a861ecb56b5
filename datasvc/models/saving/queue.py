"""Queue of background saves, for `CheckpointManager`: one thread runs them in the order of submission.

The error of a failed save is reported once: by `SaveHandle.result`, by the next `wait` or `take_unreported_failure`,
or in the log at exit, whichever comes first. The process does not exit before its saves have ended.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from datasvc.errors import BusyError, ConfigError, DatasvcError, UnavailableError
from datasvc.models.saving.flat_state import FlatState
from datasvc.models.saving.staging_buffer import HostBuffer, HostCopies
from datasvc.models.versions.metadata import VersionMetadata
from datasvc.repository import Resolved
from datasvc.threads import run_before_threads_end

logger = logging.getLogger(__name__)

OVERLAPS: Final = ("queue", "refuse")


class SaveQueue:
    """Runs saves one after the other, in a thread that exists while there are saves.

    Args:
        write: function that performs a save and returns the committed version.
        limit: largest number of saves that are queued or running.
        overlap: behaviour of a save while others are running: "queue" waits while `limit` saves are queued or
            running, "refuse" raises BusyError if any save is queued or running.
    """

    def __init__(self, write: Callable[[SaveTask], Resolved], *, limit: int, overlap: str) -> None:
        self._write = write
        self._limit = limit
        self._overlap = overlap
        self._pid = os.getpid()
        self._changed = threading.Condition()  # notified when a save has ended
        self._under_way: deque[SaveTask] = deque()  # queued or running, oldest first
        self._failed: deque[SaveHandle] = deque()  # failed saves that `take_unreported_failure` has not taken
        self._num_submitted = 0
        self._has_thread = False

    @property
    def is_busy(self) -> bool:
        """Whether a save is queued or running."""
        return bool(self._under_way)

    def check(self, step: int) -> None:
        """Check that a save of `step` may be submitted now.

        Raises:
            BusyError: an earlier save is queued or running, and `overlap` is "refuse".
            ConfigError: this process was forked from the one that made the queue.
        """
        check_process(self._pid)
        under_way = list(self._under_way)  # a save may end at any time
        if self._overlap == "refuse" and under_way:
            running_step = under_way[0].handle.step
            raise BusyError(
                f"step {step} is not saved: the save of step {running_step} is still running; save less often, or "
                "use overlap=queue"
            )

    def report_failures(self, *, to_raise: bool) -> tuple[list[int], DatasvcError | None]:
        """Report the errors of earlier saves: log each, or with `to_raise` return the first, which the caller raises.

        Returns:
            The numbers of the saves whose errors are reported, and the error to raise; None: there is none to raise.
        """
        reported = []
        while (failure := self.take_unreported_failure()) is not None:
            number, error = failure
            reported.append(number)
            if to_raise:
                return reported, error
            logger.error("%s", error)
        return reported, None

    def take_unreported_failure(self) -> tuple[int, DatasvcError] | None:
        """Return the number and error of the first unreported failure, and mark it as reported; None: no failure."""
        while self._failed:
            handle = self._failed.popleft()
            error = handle.take_unreported_error()
            if error is not None:
                return handle.number, error
        return None

    def mark_reported(self, numbers: Collection[int]) -> None:
        """Mark saves whose failure another rank has reported; they may not have ended on this rank yet.

        `numbers` are the numbers of the saves, see `SaveHandle`.
        """
        # Copy `_under_way` first, so that no save is missed: the save thread adds a failed save to `_failed` before
        # it removes the save from `_under_way`.
        handles = [task.handle for task in list(self._under_way)]
        for handle in [*handles, *list(self._failed)]:
            if handle.number in numbers:
                handle.mark_reported()

    def wait_for_slot(self) -> None:
        """Wait until fewer than `limit` saves are queued or running."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._under_way) < self._limit)

    def submit(self, task: SaveTask) -> None:
        """Queue a save behind those that were submitted before."""
        with self._changed:
            task.handle.number = self._num_submitted
            self._num_submitted += 1
            self._under_way.append(task)
            _unfinished.add(self)
            if self._has_thread:
                return
            self._has_thread = True
        try:
            # A daemon thread: the interpreter does not join it at exit. `_finish_all` waits for the saves instead.
            threading.Thread(target=self._run, name="datasvc-save", daemon=True).start()
        except RuntimeError as error:
            # The system cannot start a thread. The other ranks wait for this save, so run it in the calling thread.
            logger.warning("the save of step %d stops the training: %s", task.handle.step, error)
            self._run()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for all saves.

        Raises:
            UnavailableError: a save has not ended within `timeout` seconds.
            DatasvcError: a save failed and its error was not reported yet.
        """
        if not self.finish(timeout):
            steps = ", ".join(str(task.handle.step) for task in list(self._under_way))
            raise UnavailableError(f"the save of step {steps} has not ended within {timeout:g} s, and continues")
        failure = self.take_unreported_failure()
        if failure is not None:
            _, error = failure
            raise error

    def finish_at_exit(self) -> None:
        """Wait for all saves, then log the failures that were not reported."""
        if self._pid != os.getpid():
            # The saves of a forked process belong to its parent.
            return
        self.finish()
        self.report_failures(to_raise=False)

    def finish(self, timeout: float | None = None) -> bool:
        """Wait for all saves without reporting failures; return whether they ended within `timeout` seconds.

        Raises ConfigError: this process was forked from the one that made the queue.
        """
        check_process(self._pid)
        with self._changed:
            return self._changed.wait_for(lambda: not self._under_way, timeout)

    def _run(self) -> None:
        """Run saves, oldest first, until none is left."""
        while True:
            with self._changed:
                if not self._under_way:
                    self._has_thread = False
                    if not self._failed:
                        _unfinished.discard(self)
                    return
                task = self._under_way[0]
            version, failure = None, None
            try:
                version = self._write(task)
            except BaseException as error:  # noqa: BLE001 - raised by `result`, `wait` or the next save
                failure = error
            handle = task.handle
            # The state takes much memory. Delete this reference, so that `popleft` below deletes the last one.
            del task
            with self._changed:
                handle.settle(version, failure)
                # Append after `settle`, so that every handle in `_failed` has its error, and before `popleft`, so
                # that `mark_reported` always finds the handle in `_under_way` or `_failed`.
                if failure is not None:
                    self._failed.append(handle)
                self._under_way.popleft()
                self._changed.notify_all()


_unfinished: set[SaveQueue] = set()
"""Queues that have saves or failures to report; the references keep them alive until exit."""


def _finish_all() -> None:
    for queue in list(_unfinished):
        queue.finish_at_exit()


# Run this before the exit of the interpreter shuts down thread pools, because a save needs them.
run_before_threads_end(_finish_all)


# `SaveHandle` is the part that the caller of `save` gets: the outcome and the timings of the save.


class SaveHandle:
    """Outcome and timings of a background save; `CheckpointManager.save` returns it before the save has ended.

    Attributes:
        step: number of optimizer steps of the state.
        number: position among the saves of its queue, from 0; -1 before submission.
        stall_s: seconds for which the call stopped the training until the save was queued; a wait for the commit does
            not count. When `device_s` is measured, it is added.
        device_s: seconds for which the busiest device copied the state; None: the copies have not ended, or failed.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.number = -1
        self.stall_s = 0.0
        self.device_s: float | None = None
        self._ended = threading.Event()  # set after the outcome
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
            UnavailableError: the save has not ended within `timeout`; it continues.
            DatasvcError: the save failed; no version was committed.
        """
        check_process(self._pid)
        if not self._ended.wait(timeout):
            raise UnavailableError(f"the save of step {self.step} has not ended within {timeout:g} s, and continues")
        if self._error is not None:
            self.mark_reported()
            raise self._error
        assert self._version is not None
        return self._version

    def settle(self, version: Resolved | None, error: BaseException | None) -> None:
        """Set the outcome: the committed version, or the error; called by the queue."""
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
        with_step = kind(f"the save of step {self.step} failed: {error}")
        with_step.__cause__ = error
        return with_step

    def __repr__(self) -> str:
        state = "under way" if not self.done() else str(self._version or f"failed: {self._error}")
        return f"SaveHandle(step {self.step}, {state})"


@dataclass(frozen=True)
class SaveTask:
    """A save that is queued.

    Attributes:
        handle: receives the version or the error, and the timings.
        metadata: metadata of the version.
        state: state to save. Its tensors are the originals, which the training changes: `copies` replace them.
        copies: copies of the tensors in `buffer`, or the error that prevented them. A save with an error is queued
            too, because the other ranks have queued it; it then fails on all ranks.
        buffer: host memory of `copies`.
        next_buffer: buffer that the next save fills.
        began_s: time at which `save` was called, by `time.perf_counter`.
        extra: further fields of the entry.
    """

    handle: SaveHandle
    metadata: VersionMetadata
    state: FlatState
    copies: HostCopies | Exception
    buffer: HostBuffer
    next_buffer: HostBuffer
    began_s: float
    extra: Mapping[str, Any] = field(default_factory=dict)


def check_process(pid: int) -> None:
    """Raise ConfigError in a process other than `pid`: a forked child has none of the threads of its parent."""
    if pid != os.getpid():
        raise ConfigError("this manager was made in the parent of this forked process; make a new one in the child")
