"""Export of time spans as a Chrome trace, for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

`Loader.write_trace` and the profile of a training step use it. The file is JSON in the Trace Event Format. It has
complete events ("X"), with times in microseconds, and metadata events ("M"), with the names of process and threads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasvc.durable import write_file
from datasvc.errors import ConfigError
from datasvc.loaders.profiling.step_times import TimeSpan


def write_trace(path: str | Path, spans: Sequence[TimeSpan], *, process_name: str) -> None:
    """Write time spans of this process to a file atomically. Raises ConfigError: the file cannot be written."""
    document = {"traceEvents": trace_events(spans, os.getpid(), process_name), "displayTimeUnit": "ms"}
    try:
        write_file(Path(path), json.dumps(document).encode(), synced=False)
    except OSError as error:
        raise ConfigError(f"cannot write the trace {path}: {error}; give another path") from error


def trace_events(spans: Sequence[TimeSpan], pid: int, process_name: str) -> list[dict[str, Any]]:
    """Return the events of a trace: names first, then spans in the order of their starts.

    Of spans with the same start, the longer one is first, because it contains the others.
    """
    names = {span.thread: span.thread_name for span in spans}
    return [
        _name_event("process_name", pid, 0, process_name),
        *(_name_event("thread_name", pid, thread, name) for thread, name in names.items()),
        *(_event(span, pid) for span in sorted(spans, key=lambda span: (span.start_ns, -span.duration_ns))),
    ]


def _name_event(kind: str, pid: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": thread, "args": {"name": name}}


def _event(span: TimeSpan, pid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": "loader",
        "pid": pid,
        "tid": span.thread,
        "ts": span.start_ns / 1000,
        "dur": span.duration_ns / 1000,
        "args": {"step": span.step},
    }
