"""Properties of the execution on which estimates depend: overlap, shared processors, kind of collectives."""

from __future__ import annotations

from dataclasses import dataclass

from datasvc.errors import ConfigError


@dataclass(frozen=True)
class ExecutionTraits:
    """How ranks compute and communicate. The default is that of GPUs with NCCL.

    Attributes:
        overlap: share of the computation during which collectives of gradients and parameters make progress; 0 if the
            two compete for the same processors.
        processors_per_rank: processors that a rank has, at most 1: 0.5 if two ranks share one. Compute times must
            then be those of ranks that all compute at the same time. While a rank waits, others use its processors.
        scatters_by_all_reduce: whether a reduce-scatter is an all-reduce, of which each rank keeps its part, as in
            torch's gloo.

    Raises:
        ConfigError: a value is out of range.
    """

    overlap: float = 1.0
    processors_per_rank: float = 1.0
    scatters_by_all_reduce: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= 1:
            raise ConfigError(f"overlap is {self.overlap}; expected a number from 0, nothing, to 1, all")
        if not 0 < self.processors_per_rank <= 1:
            raise ConfigError(
                f"processors_per_rank is {self.processors_per_rank}; expected more than 0, and at most 1"
            )


GPUS = ExecutionTraits()
GLOO = ExecutionTraits(overlap=0.0, scatters_by_all_reduce=True)
