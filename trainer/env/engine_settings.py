"""The settings of the engine that runs the collective operations of a rank, validated on creation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings of an engine. They must be equal on all ranks.

    Args:
        fusion_bytes: maximum size of a fusion buffer; 0 disables fusion.
        cycle_time_s: unit of the pause between two negotiations while nothing is submitted. An idle engine pauses for
            up to fifty times this value, or up to five times with process sets. A busy engine does not pause.
        stall_warning_s: seconds after which an operation that some ranks have not submitted is logged; 0 for never.
        stall_shutdown_s: seconds after which an operation that some ranks have not submitted ends the job; 0 for
            never.
        cache_capacity: maximum number of cached requests. A rank sends only the number of a cached request.
        timeout_s: seconds for which a rank may be unreachable before the operations of the others fail.
        start_timeout_s: seconds for which `init` waits for all ranks.
        timeline: path for a Chrome trace of all operations, written by rank 0; None for no trace.
        timeline_marks_cycles: whether the trace contains the cycles of the engine.
        hierarchical_allreduce: whether sums and averages of floating-point tensors over all ranks are reduced inside
            each node first, if there are several nodes with equally many ranks, more than one; otherwise they are
            flat. None: flat, but `autotune` tries both.
        autotune: whether to search for the best `fusion_bytes` and `cycle_time_s` while the job runs.
        autotune_log: path for a CSV file of the values that `autotune` tried, written by rank 0; None for no file.

    Raises:
        ValueError: a value is out of range.
    """

    fusion_bytes: int = 128 * 1024 * 1024
    cycle_time_s: float = 0.001
    stall_warning_s: float = 60.0
    stall_shutdown_s: float = 0.0
    cache_capacity: int = 1024
    timeout_s: float = 1800.0
    start_timeout_s: float = 600.0
    timeline: str | None = None
    timeline_marks_cycles: bool = False
    hierarchical_allreduce: bool | None = None
    autotune: bool = False
    autotune_log: str | None = None

    def __post_init__(self) -> None:
        for name in ("fusion_bytes", "cycle_time_s", "stall_warning_s", "stall_shutdown_s", "cache_capacity"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")
        for name in ("timeout_s", "start_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, but is {getattr(self, name)}")
