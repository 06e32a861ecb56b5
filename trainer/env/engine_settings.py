"""Settings of one engine, checked once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How an engine paces, fuses and watches its operations. Every rank must be given the same values.

    Args:
        fusion_bytes: upper bound of a fusion buffer; 0 turns fusion off.
        cycle_time_s: pause between two exchanges while nothing is submitted; an idle engine backs off to fifty
            times this, or five where there are process sets; a busy one does not pause.
        stall_shutdown_s: seconds after which an operation that some ranks have not submitted ends the job; 0 is
            never.
        stall_warning_s: seconds after which an operation that some ranks have not submitted is logged; 0 is
            never.
        cache_capacity: how many requests are remembered, so that a repeated one travels as a number.
        timeout_s: seconds a rank may be unreachable before the others give the job up.
        start_timeout_s: seconds that `init` waits for all ranks to come.
        timeline: file for a chrome trace of all operations, which rank 0 writes; None for none.
        timeline_marks_cycles: whether cycles are marked in it.
        autotune: try other values of `fusion_bytes` and `cycle_time_s` while the job runs, and keep the best.
        autotune_log: file for what was tried, CSV, which rank 0 writes; None for none.
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
    autotune: bool = False
    autotune_log: str | None = None

    def __post_init__(self) -> None:
        for name in ("fusion_bytes", "cycle_time_s", "stall_warning_s", "stall_shutdown_s", "cache_capacity"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")
        for name in ("timeout_s", "start_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, but is {getattr(self, name)}")
