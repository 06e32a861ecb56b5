"""Where the time went, as a table with a verdict, and as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from datasvc.loaders.profiling.bottleneck import Bottleneck, Resources, diagnose
from datasvc.loaders.profiling.step_profiler import StepProfiler
from datasvc.loaders.profiling.step_times import Stage, StepTimes, Totals

_NUM_LONGEST: Final = 5


@dataclass(frozen=True)
class LongWait:
    """A step that the consumer waited for longer than for others.

    Attributes:
        step: its number, counted from 1 since the loader was made.
        wait_s: how long.
        stage: that took most of it.
    """

    step: int
    wait_s: float
    stage: Stage


@dataclass(frozen=True)
class Report:
    """Where the time of a loader's steps went; `str(report)` is a table that ends with the verdict.

    Attributes:
        totals: of all steps.
        verdict: what limits the run.
        wait_p50_s: median wait of a step. Percentiles and the longest waits are of the last 4,096 steps.
        wait_p95_s: 95 % of the steps waited no longer.
        wait_max_s: the longest wait.
        longest: at most five steps, the longest wait first.
    """

    totals: Totals
    verdict: Bottleneck
    wait_p50_s: float
    wait_p95_s: float
    wait_max_s: float
    longest: tuple[LongWait, ...]

    def __str__(self) -> str:
        totals = self.totals
        if not totals.num_steps:
            return str(self.verdict)
        return "\n".join(
            [
                f"{totals.num_steps:,} steps, {totals.num_samples:,} {self.verdict.unit}",
                f"{'stage':<10}{'seconds':>10}{'share':>9}{'ms/step':>10}{'beside, s':>11}",
                *(_row(stage, totals) for stage in Stage if stage in totals.blocked_s or stage in totals.beside_s),
                _line("consumer", totals.consumer_s, totals),
                self._waits(),
                str(self.verdict),
            ]
        )

    def _waits(self) -> str:
        longest = ", ".join(f"step {each.step} {_ms(each.wait_s)} ({each.stage})" for each in self.longest)
        return (
            f"waits: {_ms(self.wait_p50_s)} at the median, {_ms(self.wait_p95_s)} at 95 %, "
            f"{_ms(self.wait_max_s)} at most; longest: {longest}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, and the verdict's words, as JSON values."""
        totals, verdict = self.totals, self.verdict
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
                {"step": each.step, "wait_s": each.wait_s, "stage": each.stage.value} for each in self.longest
            ],
            "limit": "consumer" if verdict.stage is None else verdict.stage.value,
            "unit": verdict.unit,
            "offered": verdict.offered,
            "asked": verdict.asked,
            "starved_share": verdict.starved_share,
            "headroom": verdict.headroom,
            "verdict": str(verdict),
        }


def make_report(stopwatch: StepProfiler, means: Resources) -> Report:
    """Return where the time went since the stopwatch was made, or restarted."""
    totals, steps = stopwatch.totals(), stopwatch.steps()
    waits_s = sorted(step.wait_ns / 1e9 for step in steps)
    return Report(
        totals,
        diagnose(totals, means),
        wait_p50_s=_percentile(waits_s, 0.50),
        wait_p95_s=_percentile(waits_s, 0.95),
        wait_max_s=_percentile(waits_s, 1.0),
        longest=tuple(
            LongWait(step.number, step.wait_ns / 1e9, _longest_stage(step))
            for step in sorted(steps, key=lambda step: -step.wait_ns)[:_NUM_LONGEST]
        ),
    )


def _percentile(ascending: Sequence[float], share: float) -> float:
    """Return the value that is reached or undercut by a share of all: by nearest rank."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)] if ascending else 0.0


def _longest_stage(step: StepTimes) -> Stage:
    return max(step.blocked_ns, key=lambda stage: step.blocked_ns[stage])


def _row(stage: Stage, totals: Totals) -> str:
    beside_s = totals.beside_s.get(stage)
    return _line(stage, totals.blocked_s.get(stage, 0.0), totals) + (f"{beside_s:>11.2f}" if beside_s else "")


def _line(name: str, seconds: float, totals: Totals) -> str:
    share = seconds / max(totals.wait_s + totals.consumer_s, 1e-9)
    return f"{name:<10}{seconds:>10.2f}{share:>9.1%}{1000 * seconds / totals.num_steps:>10.2f}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
