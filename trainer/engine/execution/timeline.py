"""Timeline of the negotiation and execution of each operation, as a Chrome trace for chrome://tracing and Perfetto.

Rank 0 writes the file: every rank receives the requests of all ranks, so one file is enough. The negotiation of an
operation has a mark for each rank, so the trace shows which rank was the last to submit it.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasvc.trainer.engine.negotiation.requests import Key

logger = logging.getLogger(__name__)


class Timeline:
    """A timeline that records nothing; `TraceFile` writes a file."""

    def cycle(self) -> None:
        """Record the beginning of a cycle that has submissions."""

    def submitted(self, key: Key, kind: str, rank: int) -> None:
        """Record the submission of a rank; the first one begins the negotiation."""

    def agreed(self, key: Key) -> None:
        """Record the end of a negotiation."""

    def begin(self, keys: Sequence[Key], phase: str) -> None:
        """Record that operations begin to run together."""

    def activity(self, keys: Sequence[Key], name: str) -> None:
        """Record the beginning of an activity of these operations, and the end of their previous one."""

    def end(self, keys: Sequence[Key]) -> None:
        """Record the end of operations."""

    def close(self) -> None:
        """Complete the timeline."""


class TraceFile(Timeline):
    """A Chrome trace that is written while the job runs, so that it can be read after a crash. Thread-safe.

    Args:
        path: path of the JSON file, which is overwritten.
        marks_cycles: whether each cycle gets a mark.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, *, marks_cycles: bool = False) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._file.write("[\n")
        self._marks_cycles = marks_cycles
        self._start_ns = time.monotonic_ns()
        self._lines: queue.SimpleQueue[list[dict[str, Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Each operation has a row. A row is a process (`pid`) of the trace, because viewers group events by process.
        self._rows: dict[Key, int] = {}
        self._is_negotiating: set[Key] = set()
        self._has_activity: set[Key] = set()
        self._is_closed = False
        # A separate thread writes, because a slow file system must not delay operations.
        self._writer = threading.Thread(target=self._write, name="trainer-timeline", daemon=True)
        self._writer.start()

    def cycle(self) -> None:
        """See `Timeline`."""
        if self._marks_cycles:
            self._put([{"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0}])

    def submitted(self, key: Key, kind: str, rank: int) -> None:
        """See `Timeline`."""
        events: list[dict[str, Any]] = []
        with self._lock:
            row = self._row(key, events)
            if key not in self._is_negotiating:
                self._is_negotiating.add(key)
                events.append({"name": f"NEGOTIATE_{kind}", "ph": "B", "pid": row})
            events.append({"name": str(rank), "ph": "X", "dur": 0, "pid": row})
            self._put(events)

    def agreed(self, key: Key) -> None:
        """See `Timeline`."""
        with self._lock:
            if key in self._is_negotiating:
                self._is_negotiating.discard(key)
                self._put([{"ph": "E", "pid": self._rows[key]}])

    def begin(self, keys: Sequence[Key], phase: str) -> None:
        """See `Timeline`."""
        events: list[dict[str, Any]] = []
        with self._lock:
            for key in keys:
                row = self._row(key, events)
                events.append({"name": phase, "ph": "B", "pid": row})
            self._put(events)

    def activity(self, keys: Sequence[Key], name: str) -> None:
        """See `Timeline`."""
        events: list[dict[str, Any]] = []
        with self._lock:
            for key in keys:
                row = self._row(key, events)
                if key in self._has_activity:
                    events.append({"ph": "E", "pid": row})
                self._has_activity.add(key)
                events.append({"name": name, "ph": "B", "pid": row})
            self._put(events)

    def end(self, keys: Sequence[Key]) -> None:
        """See `Timeline`."""
        events = []
        with self._lock:
            for key in keys:
                if key in self._has_activity:
                    self._has_activity.discard(key)
                    events.append({"ph": "E", "pid": self._rows[key]})
                events.append({"ph": "E", "pid": self._rows[key]})
            self._put(events)

    def close(self) -> None:
        """See `Timeline`."""
        if not self._is_closed:
            self._is_closed = True
            self._lines.put(None)
            self._writer.join()

    def _row(self, key: Key, events: list[dict[str, Any]]) -> int:
        if key not in self._rows:
            self._rows[key] = len(self._rows) + 1
            name = f"{key.name} (process set {key.process_set})" if key.process_set else key.name
            events.append({"name": "process_name", "ph": "M", "pid": self._rows[key], "args": {"name": name}})
        return self._rows[key]

    def _put(self, events: list[dict[str, Any]]) -> None:
        now_us = (time.monotonic_ns() - self._start_ns) / 1e3
        if events:
            self._lines.put([{"ts": now_us, "tid": 0, **event} for event in events])

    def _write(self) -> None:
        try:
            with self._file:
                self._write_events()
        except OSError as error:
            logger.warning("cannot write the timeline %s any more: %s", self._file.name, error)
            # Discard later events until `close`: a full disk must not end the job, nor fill the memory.
            while self._lines.get() is not None:
                pass

    def _write_events(self) -> None:
        is_first = True
        while (events := self._lines.get()) is not None:
            for event in events:
                self._file.write(("" if is_first else ",\n") + json.dumps(event))
                is_first = False
            # After a crash the file has all events up to the last time the queue was empty. It lacks the closing
            # bracket, which viewers do not need.
            if self._lines.empty():
                self._file.flush()
        self._file.write("\n]\n")
