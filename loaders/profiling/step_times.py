"""The values that `StepProfiler` collects: stages, steps, time spans, and sums over steps.

A step is one call for a batch plus the consumer's time until the next call. The call is the consumer's wait. Each
moment inside the call belongs to one stage, the innermost, so the times of the stages add up to the wait. Work of
other threads, such as decoding, is counted separately, as time beside the calls. It costs the consumer time only if a
call waits for it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

from datasvc.durable import write_file
from datasvc.errors import ConfigError

# Even a wait for a thread that has finished takes some time. So a step counts as bound by threads only if the waits
# for them take more than this fraction of the step.
_BOUND_SHARE: Final = 0.02
_S_PER_NS: Final = 1e-9


BATCH: Final = "batch"
"""Name of the range of a complete call for a batch."""
WAIT: Final = "wait"
"""Name of the range of a call's wait for other threads."""


class Stage(StrEnum):
    """A stage of a loader's work."""

    ORIGIN = "origin"  # fetching shards, or samples of them, from the origin
    PEER = "peer"  # fetching shards from another node
    CACHE = "cache"  # opening and releasing resident shards
    READ = "read"  # planning the batch, views of samples, values of columns
    DECODE = "decode"  # converting samples to arrays
    COLLATE = "collate"  # combining decoded samples into one batch
    TRANSFER = "transfer"  # host to device
    START = "start"  # creating the decoder
    LEDGER = "ledger"  # recording the served samples
    LOADER = "loader"  # everything else in the call


# These three stages share one name: where a shard comes from is known only after its range was opened, and a range
# cannot be renamed.
_OPENING: Final = frozenset({Stage.ORIGIN, Stage.PEER, Stage.CACHE})
_NAMES: Final[Mapping[str, str]] = {
    **{stage: f"datasvc.loader.{'shard' if stage in _OPENING else stage}" for stage in Stage},
    **{kind: f"datasvc.loader.{kind}" for kind in (BATCH, WAIT)},
}


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A time span of one thread; spans of one thread may be nested.

    Attributes:
        name: a stage; "wait" for a complete call; "consumer" for the consumer's time after the call.
        thread: identifier of the thread, from `threading.get_ident`.
        thread_name: name of the thread at that time.
        start_ns: start by the profiler's clock.
        duration_ns: duration of the span.
        step: number of the step; for work of other threads, the number of the last step handed over.
    """

    name: str
    thread: int
    thread_name: str
    start_ns: int
    duration_ns: int
    step: int


class StepTimes(NamedTuple):
    """Times of one step.

    Attributes:
        number: number of the step, counted from 1 since the loader was created.
        num_samples: number of samples handed over.
        wait_ns: duration of the call.
        consumer_ns: time from the end of the call to the next call.
        blocked_ns: time inside the call by stage; the sum is `wait_ns`.
        waiting_ns: part of `blocked_ns` that the call waited for other threads, by stage.
    """

    number: int
    num_samples: int
    wait_ns: int
    consumer_ns: int
    blocked_ns: Mapping[Stage, int]
    waiting_ns: Mapping[Stage, int]


@dataclass(frozen=True)
class Totals:
    """Sums over steps.

    Attributes:
        num_steps: number of batches handed over.
        num_samples: number of samples handed over.
        wait_s: time inside the calls.
        consumer_s: time between the calls.
        blocked_s: time inside the calls by stage; the sum is `wait_s`.
        waiting_s: part of `blocked_s` that calls waited for other threads, by stage.
        beside_s: time of other threads by stage, summed over threads.
        num_beside: maximum number of other threads in a stage at the same time.
        num_bound_steps: number of steps whose call waited for other threads for more than `_BOUND_SHARE` of the step.
    """

    num_steps: int = 0
    num_samples: int = 0
    wait_s: float = 0.0
    consumer_s: float = 0.0
    blocked_s: Mapping[Stage, float] = field(default_factory=dict)
    waiting_s: Mapping[Stage, float] = field(default_factory=dict)
    beside_s: Mapping[Stage, float] = field(default_factory=dict)
    num_beside: Mapping[Stage, int] = field(default_factory=dict)
    num_bound_steps: int = 0


@dataclass
class Sums:
    """Sums over steps, in nanoseconds, to which steps are added. The attributes are those of `Totals`."""

    num_steps: int = 0
    num_samples: int = 0
    num_bound_steps: int = 0
    wait_ns: int = 0
    consumer_ns: int = 0
    blocked_ns: Counter[Stage] = field(default_factory=Counter)
    waiting_ns: Counter[Stage] = field(default_factory=Counter)
    beside_ns: Counter[Stage] = field(default_factory=Counter)
    num_beside: Counter[Stage] = field(default_factory=Counter)

    def add(self, step: StepTimes) -> None:
        """Add a step."""
        self.num_steps += 1
        self.num_samples += step.num_samples
        self.wait_ns += step.wait_ns
        self.consumer_ns += step.consumer_ns
        # A loop, because `Counter.update` takes several times as long, and this runs in every step.
        for stage, duration_ns in step.blocked_ns.items():
            self.blocked_ns[stage] += duration_ns
        if step.waiting_ns:
            # A longer wait shows that the threads had not finished when the call began, so they limit the step.
            self.num_bound_steps += sum(step.waiting_ns.values()) > _BOUND_SHARE * (step.wait_ns + step.consumer_ns)
            for stage, duration_ns in step.waiting_ns.items():
                self.waiting_ns[stage] += duration_ns

    def add_beside(self, stage: Stage, duration_ns: int, num_threads: int) -> None:
        """Add work of another thread. `num_threads` is the number of threads in the stage at that time."""
        self.beside_ns[stage] += duration_ns
        self.num_beside[stage] = max(self.num_beside[stage], num_threads)

    def plus(self, other: Sums) -> Sums:
        """Return the sums of both; for `num_beside`, the maximum of both."""
        sums = {sum_.name: getattr(self, sum_.name) + getattr(other, sum_.name) for sum_ in fields(self)}
        return Sums(**sums | {"num_beside": self.num_beside | other.num_beside})

    def totals(self) -> Totals:
        """Return the sums in seconds."""
        return Totals(
            num_steps=self.num_steps,
            num_samples=self.num_samples,
            wait_s=self.wait_ns * _S_PER_NS,
            consumer_s=self.consumer_ns * _S_PER_NS,
            blocked_s=_seconds(self.blocked_ns),
            waiting_s=_seconds(self.waiting_ns),
            beside_s=_seconds(self.beside_ns),
            num_beside=dict(self.num_beside),
            num_bound_steps=self.num_bound_steps,
        )


def _seconds(times_ns: Mapping[Stage, int]) -> dict[Stage, float]:
    return {stage: value * _S_PER_NS for stage, value in times_ns.items() if value}


# `Loader.write_trace` and the profile of a training step use it. The file is JSON in the Trace Event Format. It has
# complete events ("X"), with times in microseconds, and metadata events ("M"), with the names of process and threads.


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


def trace_path(path: str, *, rank: int, num_ranks: int) -> Path:
    """Return the path of a rank's trace. With several ranks, the rank comes before the suffix: `trace.1.json`."""
    trace = Path(path)
    return trace if num_ranks == 1 else trace.with_name(f"{trace.stem}.{rank}{trace.suffix}")
