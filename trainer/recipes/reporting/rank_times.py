"""Compares the times of all ranks: in synchronous training, the ranks wait for the slowest one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

STRAGGLER_FACTOR: Final = 1.2
"""A rank whose own time is this many times the median of all ranks is a straggler."""
WAITING_PARTS: Final = ("targets_s", "all_reduce_s")
"""Parts of a step in which replicas of a model wait for each other: they sum numbers of targets, and gradients."""
_MAX_RANKS: Final = 256  # in one event


class RankTimes:
    """Sums the times of this rank until the ranks compare them."""

    def __init__(self) -> None:
        self._sums_s: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._sums_s)

    def add(self, times_s: Mapping[str, float]) -> None:
        """Add times of steps by name, in seconds."""
        for name, value in times_s.items():
            self._sums_s[name] = self._sums_s.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1

    def take(self) -> dict[str, float]:
        """Return the means since the last call."""
        means = {name: total / self._counts[name] for name, total in self._sums_s.items()}
        self._sums_s, self._counts = {}, {}
        return means


def describe_ranks(
    hosts: Sequence[str], times_s: Sequence[Mapping[str, float]], *, has_own_times: bool = True
) -> dict[str, Any]:
    """Return the facts of an event that compares the ranks.

    Args:
        hosts: name of the host of each rank.
        times_s: mean times of each rank: `step_s`, `wait_s` for data, and if measured `all_reduce_s` and others.
        has_own_times: whether the ranks wait for each other in the parts of `WAITING_PARTS` only. If not, nothing
            measured tells a slow rank from those that wait for it.

    Returns:
        Columns with an element for each rank: `rank`, `host` and the times. With `has_own_times` also `own_s`, the
        time of a step without the parts in which the ranks wait for each other; and `stragglers`, the ranks with a
        much longer own time. Of more than 256 ranks, those with the longest own times or steps.
    """
    waiting = WAITING_PARTS if has_own_times else ()
    own_s = [times.get("step_s", 0.0) - sum(times.get(part, 0.0) for part in waiting) for times in times_s]
    ranks = sorted(range(len(own_s)), key=lambda rank: -own_s[rank])[:_MAX_RANKS]
    chosen = sorted(ranks)
    names = sorted({name for times in times_s for name in times})
    facts = {
        "num_ranks": len(own_s),
        "rank": chosen,
        "host": [hosts[rank] for rank in chosen],
        **{name: [_round(times_s[rank].get(name, 0.0)) for rank in chosen] for name in names},
    }
    if has_own_times:
        median = statistics.median(own_s)
        facts["own_s"] = [_round(own_s[rank]) for rank in chosen]
        facts["stragglers"] = [rank for rank in ranks if own_s[rank] > STRAGGLER_FACTOR * median]
    return facts


def _round(seconds: float) -> float:
    return float(f"{seconds:.4g}")
