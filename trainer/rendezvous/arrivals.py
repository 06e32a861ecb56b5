"""Finds ranks that do not start in time, or do not call `init` in time.

The launcher of a job that is not elastic polls it. The module reads no clock: its caller passes the time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

DEFAULT_LIMIT_S = 60.0
_KEY_PREFIX = "trainer/arrived"


def arrival_key(rank: int) -> str:
    """Return the key that `init` sets in the launcher's store; the launcher reports ranks without this key."""
    return f"{_KEY_PREFIX}/{rank}"


@dataclass(frozen=True)
class LateRanks:
    """Ranks that have not made a step in time. `missing_step` follows "did not", such as "start"."""

    ranks: tuple[int, ...]
    missing_step: str


class Arrivals:
    """The arrivals of the ranks: first the starts of their processes, then their calls of `init`.

    A program may never call `init`, so the limit for this call begins when the first rank has called it.

    Args:
        num_ranks: number of ranks of the job.
        limit_s: maximum time for a step: from the start of the job, or from the first call of `init`.
        now_s: time of the start; all calls use the same clock.

    Attributes:
        is_over: whether all ranks have arrived, so that the caller need not poll any more.
    """

    def __init__(self, num_ranks: int, *, limit_s: float, now_s: float) -> None:
        self._ranks = range(num_ranks)
        self._limit_s = limit_s
        self._start_s = now_s
        self._first_init_s: float | None = None
        self._reported_steps: set[str] = set()  # values of `LateRanks.missing_step`
        self.is_over = False

    def find_late(self, *, now_s: float, started: Collection[int], called: Collection[int]) -> LateRanks | None:
        """Return the ranks that are late, or None. Each missing step is reported only once.

        Args:
            now_s: current time.
            started: ranks whose program runs or has ended.
            called: ranks that have called `init` or have ended; empty until a rank has called it.
        """
        missing = tuple(rank for rank in self._ranks if rank not in started)
        if missing:
            return self._report_once(LateRanks(missing, "start"), now_s - self._start_s)
        # All processes have started, so only calls of init() can be missing.
        missing = tuple(rank for rank in self._ranks if rank not in called)
        self.is_over = not missing
        if called and missing:
            self._first_init_s = now_s if self._first_init_s is None else self._first_init_s
            return self._report_once(LateRanks(missing, "call hvd.init()"), now_s - self._first_init_s)
        return None

    def _report_once(self, late: LateRanks, waited_s: float) -> LateRanks | None:
        """Return `late`; None before the limit, or if this step was reported before."""
        if late.missing_step in self._reported_steps or waited_s < self._limit_s:
            return None
        self._reported_steps.add(late.missing_step)
        return late
