"""Export of time spans as a Chrome trace, for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

`Loader.write_trace` and the profile of a training step use it. The file is JSON in the Trace Event Format. It has
complete events ("X"), with times in microseconds, and metadata events ("M"), with the names of process and threads.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from datasvc.durable import write_file
from datasvc.errors import ConfigError
from datasvc.loaders.profiling.step_times import Stage, TimeSpan

BATCH: Final = "batch"
"""Name of the range of a complete call for a batch."""
WAIT: Final = "wait"
"""Name of the range of a call's wait for other threads."""

# These three stages share one name: where a shard comes from is known only after its range was opened, and a range
# cannot be renamed.
_OPENING: Final = frozenset({Stage.ORIGIN, Stage.PEER, Stage.CACHE})
_NAMES: Final[Mapping[str, str]] = {
    **{stage: f"datasvc.loader.{'shard' if stage in _OPENING else stage}" for stage in Stage},
    **{kind: f"datasvc.loader.{kind}" for kind in (BATCH, WAIT)},
}


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


# `StepProfiler` opens a range for each stage and each call. In a process that an NVTX tool started, or that has
# `DATASVC_NVTX=1`, these are NVTX ranges. In other processes they are ranges of torch's profiler, while it records.
# Without either, a stage costs only two checks of flags. This module does not import torch, so it opens no range
# until other code has imported torch.


def is_under_nvtx_tool(environ: Mapping[str, str]) -> bool:
    """Return whether an NVTX tool started this process, or `DATASVC_NVTX=1` requests ranges."""
    # NVTX tools set the path of an injection library; Nsight Systems also sets its session id.
    tools = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
    is_requested = environ.get("DATASVC_NVTX", "").strip().lower() not in {"", "0", "false", "no", "off"}
    return is_requested or any(environ.get(name) for name in tools)


_IS_UNDER_NVTX_TOOL: Final = is_under_nvtx_tool(os.environ)  # computed once, because each stage checks it


def open_range(kind: str) -> Callable[[], object] | None:
    """Open the range of a stage, `BATCH` or `WAIT` in the calling thread.

    Returns:
        A function that closes the range. None if no range was opened: neither torch's profiler nor NVTX ranges are
        on, or NVTX ranges are on but torch is not imported or was built without CUDA.
    """
    if _IS_UNDER_NVTX_TOOL:
        return _open_nvtx(kind)
    # This flag is set for the whole process. Torch's public checks are per thread, and miss the decoding threads.
    profiler: Any = sys.modules.get("torch.autograd.profiler")
    if profiler is None or not profiler._is_profiler_enabled:  # noqa: SLF001 - see above
        return None
    range_ = profiler.record_function(_NAMES[kind])
    range_.__enter__()
    return lambda: range_.__exit__(None, None, None)


def _open_nvtx(kind: str) -> Callable[[], object] | None:
    """Open an NVTX range; see `open_range`."""
    torch: Any = sys.modules.get("torch")
    if torch is None or torch.version.cuda is None:  # builds without CUDA have no NVTX
        return None
    torch.cuda.nvtx.range_push(_NAMES[kind])
    close: Callable[[], object] = torch.cuda.nvtx.range_pop
    return close
