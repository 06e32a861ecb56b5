"""Which rank is missing? Decides from what is known of each when to say so. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

DEFAULT_LIMIT_S = 60.0
_PREFIX = "trainer/arrived"


def arrival_key(rank: int) -> str:
    """What `init` sets in the launcher's store, so that the launcher can name the ranks that have not called it."""
    return f"{_PREFIX}/{rank}"


@dataclass(frozen=True)
class Late:
    """Ranks that have kept the others waiting for too long, and what they have not done."""

    ranks: tuple[int, ...]
    what: str


class Arrivals:
    """Watches the ranks come: first their processes, on hosts that may be slow or gone, then their calls of `init`.

    A program need not call `init`, so a rank is late with that only once another has called it.

    Args:
        num_ranks: of the job.
        limit_s: for how long a rank may keep the others waiting.
        now_s: the time of the start, on the clock of all calls.
    """

    def __init__(self, num_ranks: int, *, limit_s: float, now_s: float) -> None:
        self._ranks = range(num_ranks)
        self._limit_s = limit_s
        self._start_s = now_s
        self._first_init_s: float | None = None
        self._all_have_come = False
        self._has_reported = False
        self.is_over = False

    def look(self, *, now_s: float, come: Collection[int], called: Collection[int]) -> Late | None:
        """The ranks that are late now; each kind is reported once.

        Args:
            now_s: the time.
            come: ranks whose program runs, or has ended.
            called: ranks that have called `init`, or have ended.
        """
        missing = tuple(rank for rank in self._ranks if rank not in come)
        if missing:
            return self._judge(Late(missing, "start"), now_s - self._start_s)
        if not self._all_have_come:
            self._all_have_come, self._has_reported = True, False
        missing = tuple(rank for rank in self._ranks if rank not in called)
        self.is_over = not missing
        if called and missing:
            self._first_init_s = now_s if self._first_init_s is None else self._first_init_s
            return self._judge(Late(missing, "call hvd.init()"), now_s - self._first_init_s)
        return None

    def _judge(self, late: Late, waited_s: float) -> Late | None:
        if self._has_reported or waited_s < self._limit_s:
            return None
        self._has_reported = True
        return late
