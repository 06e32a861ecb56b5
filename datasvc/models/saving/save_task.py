"""`SaveTask`: all data of one background save, which the training thread passes to the save thread.

`SaveHandle` is the part that the caller of `save` gets: the outcome and the timings of the save.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from datasvc.errors import ConfigError, DatasvcError, UnavailableError
from datasvc.models.saving.flat_state import FlatState
from datasvc.models.saving.staging_buffer import HostBuffer, HostCopies
from datasvc.models.versions.metadata import VersionMetadata
from datasvc.repository import Resolved


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
