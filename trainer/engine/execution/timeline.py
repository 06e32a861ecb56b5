"""Timeline of the negotiation and execution of each operation, as a Chrome trace, and ranges for profilers.

Rank 0 writes the file, for chrome://tracing and Perfetto. While a timeline is recorded, every rank receives the
requests of all ranks, so one file is enough. The negotiation of an operation has an instant event for each rank, so
the trace shows which rank was the last to submit it.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler

from datasvc.trainer.engine.negotiation.requests import Key
from datasvc.trainer.env.environment import is_under_nvtx_tool

logger = logging.getLogger(__name__)


_NO_RANGE = nullcontext()
_IS_UNDER_NVTX_TOOL = torch.version.cuda is not None and is_under_nvtx_tool(os.environ)


class Timeline:
    """The interface of a timeline, and the default, which records nothing; `TraceFile` writes a file."""

    is_recording = False
    """Whether the requests of all ranks are needed in each cycle."""

    def cycle(self) -> None:
        """Record the beginning of a cycle that has submissions."""

    def submitted(self, key: Key, kind: str, rank: int) -> None:
        """Record that a rank has submitted an operation; the first rank that does so begins the negotiation."""

    def agreed(self, key: Key) -> None:
        """Record the end of the negotiation of an operation."""

    def begin(self, keys: Sequence[Key], phase: str) -> None:
        """Record that operations begin to run together; `phase` is the name of the event."""

    def activity(self, keys: Sequence[Key], name: str) -> None:
        """Record the beginning of an activity of these operations, and the end of their previous activity."""

    def end(self, keys: Sequence[Key]) -> None:
        """Record the end of operations, and of their last activity."""

    def close(self) -> None:
        """Complete the timeline."""


class TraceFile(Timeline):
    """A Chrome trace that is written while the job runs, so that it can be read after a crash. Thread-safe.

    The field `ph` of an event is its type in the Chrome trace format: "B" begins a range, "E" ends the innermost
    range of the row, "X" is a range with a duration, "i" an instant, and "M" the name of a row.

    Raises OSError: the file cannot be written. An existing file is overwritten.
    """

    is_recording = True

    def __init__(self, path: Path, *, marks_cycles: bool = False) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._file.write("[\n")
        self._marks_cycles = marks_cycles
        self._start_ns = time.monotonic_ns()
        # Lists of events for `_writer`; the events of a list have the same time. None ends the file.
        self._queue: queue.SimpleQueue[list[dict[str, Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Each operation has a row. A row is a process (`pid`) of the trace, because viewers group events by process.
        self._rows: dict[Key, int] = {}
        self._negotiating: set[Key] = set()
        self._with_activity: set[Key] = set()
        self._is_closed = False
        # A separate thread writes, because a slow file system must not delay operations.
        self._writer = threading.Thread(target=self._write, name="trainer-timeline", daemon=True)
        self._writer.start()

    def cycle(self) -> None:
        """Write an instant event for the cycle if `marks_cycles` is set."""
        if self._marks_cycles:
            self._put([{"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0}])

    def submitted(self, key: Key, kind: str, rank: int) -> None:
        """Begin the range of the negotiation if it is new, and write an instant event for the rank."""
        events: list[dict[str, Any]] = []
        with self._lock:
            row = self._row(key, events)
            if key not in self._negotiating:
                self._negotiating.add(key)
                events.append({"name": f"NEGOTIATE_{kind}", "ph": "B", "pid": row})
            events.append({"name": str(rank), "ph": "X", "dur": 0, "pid": row})
            self._put(events)

    def agreed(self, key: Key) -> None:
        """End the range of the negotiation."""
        with self._lock:
            if key in self._negotiating:
                self._negotiating.discard(key)
                self._put([{"ph": "E", "pid": self._rows[key]}])

    def begin(self, keys: Sequence[Key], phase: str) -> None:
        """Begin a range with the name of the phase in the row of each operation."""
        events: list[dict[str, Any]] = []
        with self._lock:
            for key in keys:
                row = self._row(key, events)
                events.append({"name": phase, "ph": "B", "pid": row})
            self._put(events)

    def activity(self, keys: Sequence[Key], name: str) -> None:
        """Begin the range of an activity inside the range of the phase, after the end of the previous activity."""
        events: list[dict[str, Any]] = []
        with self._lock:
            for key in keys:
                row = self._row(key, events)
                if key in self._with_activity:
                    events.append({"ph": "E", "pid": row})
                self._with_activity.add(key)
                events.append({"name": name, "ph": "B", "pid": row})
            self._put(events)

    def end(self, keys: Sequence[Key]) -> None:
        """End the ranges of the activity and of the phase."""
        events = []
        with self._lock:
            for key in keys:
                if key in self._with_activity:
                    self._with_activity.discard(key)
                    events.append({"ph": "E", "pid": self._rows[key]})
                events.append({"ph": "E", "pid": self._rows[key]})
            self._put(events)

    def close(self) -> None:
        """Write the remaining events and the end of the file, and wait until they are written."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)
            self._writer.join()

    def _row(self, key: Key, events: list[dict[str, Any]]) -> int:
        """Return the row of an operation. For a new row, append the event that names it to `events`."""
        if key not in self._rows:
            self._rows[key] = len(self._rows) + 1
            name = f"{key.name} (process set {key.process_set})" if key.process_set else key.name
            events.append({"name": "process_name", "ph": "M", "pid": self._rows[key], "args": {"name": name}})
        return self._rows[key]

    def _put(self, events: list[dict[str, Any]]) -> None:
        """Add the current time to events and queue them for the writer."""
        now_us = (time.monotonic_ns() - self._start_ns) / 1e3
        if events:
            self._queue.put([{"ts": now_us, "tid": 0, **event} for event in events])

    def _write(self) -> None:
        try:
            with self._file:
                self._write_events()
        except OSError as error:
            logger.warning("cannot write the timeline %s any more: %s", self._file.name, error)
            # Discard later events until `close`, so that a full disk neither ends the job nor fills the memory.
            while self._queue.get() is not None:
                pass

    def _write_events(self) -> None:
        is_first = True
        while (events := self._queue.get()) is not None:
            for event in events:
                self._file.write(("" if is_first else ",\n") + json.dumps(event))
                is_first = False
            # A crash loses only the events since the queue was last empty. The file then lacks the closing bracket,
            # which viewers do not need.
            if self._queue.empty():
                self._file.flush()
        self._file.write("\n]\n")


# The engine enters a range for each phase of its work. Without a profiler, entering a range only checks two flags.


def profiled(work: str) -> AbstractContextManager[object]:
    """Return a context manager that records its block as the range `datasvc.engine.<work>` of this thread."""
    if _IS_UNDER_NVTX_TOOL:
        nvtx: AbstractContextManager[object] = torch.cuda.nvtx.range(f"datasvc.engine.{work}")
        return nvtx
    # Use torch's private flag, which is global. Its public checks are per thread, and the user starts the profiler in
    # another thread than the engine's.
    if not profiler._is_profiler_enabled:  # noqa: SLF001 - see above
        return _NO_RANGE
    return profiler.record_function(f"datasvc.engine.{work}")
