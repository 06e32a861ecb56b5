"""Report on a loader's steps: time per stage, waits and the bottleneck, as a table and as JSON values.

`Loader.report` returns it. A step is a call for a batch, which the consumer waits for, and the consumer's time until
the next call. The column "beside" of the table has the time of other threads, such as those that decode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from datasvc.loaders.profiling.bottleneck import Bottleneck, Resources, diagnose
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage, Totals
from datasvc.shown import Shown, plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NUM_LONGEST: Final = 5


@dataclass(frozen=True)
class LongWait:
    """One of the steps with the longest waits.

    Attributes:
        step: number of the step, counted from 1 since the loader was created.
        wait_s: duration of the wait.
        stage: the stage that took the largest part of the wait.
    """

    step: int
    wait_s: float
    stage: Stage


@dataclass(frozen=True)
class Report(Shown):
    """Time per stage of a loader's steps; `str(report)` is a table, and its last line names the bottleneck.

    Attributes:
        totals: sums over all steps since the loader's last `restart_report`.
        bottleneck: the stage that limits the run, or the consumer.
        wait_p50_s: median wait. This value and those below cover only the last steps, up to 4,096.
        wait_p95_s: 95th percentile of the waits.
        wait_max_s: longest wait.
        longest: the steps with the longest waits, up to five, longest first.
    """

    totals: Totals
    bottleneck: Bottleneck
    wait_p50_s: float
    wait_p95_s: float
    wait_max_s: float
    longest: tuple[LongWait, ...]

    def __str__(self) -> str:
        totals = self.totals
        if not totals.num_steps:
            return str(self.bottleneck)
        return "\n".join(
            [
                f"{totals.num_steps:,} steps, {totals.num_samples:,} {self.bottleneck.unit}",
                f"{'stage':<10}{'seconds':>10}{'share':>9}{'ms/step':>10}{'beside, s':>11}",
                *(_row(stage, totals) for stage in Stage if stage in totals.blocked_s or stage in totals.beside_s),
                _line("consumer", totals.consumer_s, totals),
                self._waits(),
                str(self.bottleneck),
            ]
        )

    def _waits(self) -> str:
        longest = ", ".join(f"step {wait.step} {_ms(wait.wait_s)} ({wait.stage})" for wait in self.longest)
        return (
            f"waits: {_ms(self.wait_p50_s)} at the median, {_ms(self.wait_p95_s)} at 95 %, "
            f"{_ms(self.wait_max_s)} at most; longest: {longest}"
        )

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Plot the time of a step by stage; return the axes of matplotlib.

        Args:
            ax: axes to plot into; None for a new figure.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        return plot(self, ax=ax)

    def of_all_ranks(self, num_ranks: int) -> Report:
        """Return the report of this rank with the rates of all data ranks, which take equal steps together."""
        found = self.bottleneck
        asked = None if found.asked is None else num_ranks * found.asked
        return replace(self, bottleneck=replace(found, offered=num_ranks * found.offered, asked=asked))

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, and the bottleneck in words, as JSON values."""
        totals, bottleneck = self.totals, self.bottleneck
        return {
            "num_steps": totals.num_steps,
            "num_samples": totals.num_samples,
            "wait_s": totals.wait_s,
            "consumer_s": totals.consumer_s,
            "blocked_s": {stage.value: blocked_s for stage, blocked_s in totals.blocked_s.items()},
            "beside_s": {stage.value: beside_s for stage, beside_s in totals.beside_s.items()},
            "wait_p50_s": self.wait_p50_s,
            "wait_p95_s": self.wait_p95_s,
            "wait_max_s": self.wait_max_s,
            "longest": [
                {"step": wait.step, "wait_s": wait.wait_s, "stage": wait.stage.value} for wait in self.longest
            ],
            "limit": "consumer" if bottleneck.stage is None else bottleneck.stage.value,
            "unit": bottleneck.unit,
            "offered": bottleneck.offered,
            "asked": bottleneck.asked,
            "starved_share": bottleneck.starved_share,
            "headroom": bottleneck.headroom,
            "verdict": str(bottleneck),
        }


def make_report(profiler: StepProfiler, resources: Resources) -> Report:
    """Return a report on the steps since the profiler was created or restarted."""
    totals, steps = profiler.totals(), profiler.steps()
    waits_s = sorted(step.wait_ns / 1e9 for step in steps)
    return Report(
        totals,
        diagnose(totals, resources),
        wait_p50_s=_percentile(waits_s, 0.50),
        wait_p95_s=_percentile(waits_s, 0.95),
        wait_max_s=_percentile(waits_s, 1.0),
        longest=tuple(
            LongWait(step.number, step.wait_ns / 1e9, max(step.blocked_ns, key=step.blocked_ns.__getitem__))
            for step in sorted(steps, key=lambda step: -step.wait_ns)[:_NUM_LONGEST]
        ),
    )


def _percentile(ascending: Sequence[float], fraction: float) -> float:
    """Return a percentile of sorted values by the nearest-rank method; 0 without values."""
    return ascending[max(0, math.ceil(fraction * len(ascending)) - 1)] if ascending else 0.0


def _row(stage: Stage, totals: Totals) -> str:
    """Return the row of a stage. Only rows of stages have the column "beside"."""
    beside_s = totals.beside_s.get(stage)
    return _line(stage, totals.blocked_s.get(stage, 0.0), totals) + (f"{beside_s:>11.2f}" if beside_s else "")


def _line(name: str, seconds: float, totals: Totals) -> str:
    """Return the columns of any row: seconds, share of all time, and milliseconds per step."""
    share = seconds / max(totals.wait_s + totals.consumer_s, 1e-9)
    return f"{name:<10}{seconds:>10.2f}{share:>9.1%}{1000 * seconds / totals.num_steps:>10.2f}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
