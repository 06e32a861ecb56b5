"""Settings of one engine, checked once."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How an engine paces, fuses and watches its operations. Every rank must be given the same values.

    Args:
        fusion_bytes: upper bound of a fusion buffer; 0 turns fusion off.
        cycle_time_s: pause between two exchanges while nothing is submitted; an idle engine backs off to five
            times this, a busy one does not pause.
        stall_warning_s: seconds after which an operation that some ranks have not submitted is logged; 0 is
            never.
        cache_capacity: how many requests are remembered, so that a repeated one travels as a number.
        timeout_s: seconds a rank may be unreachable before the others give the job up.
    """

    fusion_bytes: int = 128 * 1024 * 1024
    cycle_time_s: float = 0.001
    stall_warning_s: float = 60.0
    cache_capacity: int = 1024
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        for name in ("fusion_bytes", "cycle_time_s", "stall_warning_s", "cache_capacity"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, but is {self.timeout_s}")
