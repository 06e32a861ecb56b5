"""Chooses threads and prefetch of a loader from reports on its steps, as Koliousis et al. 2019 and tf.data do. Pure.

The search climbs: it raises one of both while the consumer waits for decoding, and keeps the value if that serves
more samples. Otherwise it goes back, and never raises that one again. So it ends: values only rise, up to limits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from datasvc.loaders.profiling.bottleneck import is_thread_bound
from datasvc.loaders.profiling.report import Report
from datasvc.loaders.profiling.step_times import Stage

MIN_STEPS: Final = 20
"""Fewer steps are not judged; the next report counts them too."""
_MIN_GAIN: Final = 0.05  # a smaller one may be a difference between two epochs

Raised = Literal["num_threads", "prefetch"]


@dataclass(frozen=True)
class LoaderSetting:
    """What of a loader changes its speed and no batch: decoding threads, and batches in progress."""

    num_threads: int
    prefetch: int


@dataclass(frozen=True)
class LoaderTuning:
    """A search for the setting of a loader.

    Attributes:
        setting: setting to use now.
        reason: why, in words.
        raised: what of `setting` is on trial; None: nothing.
        before: the setting before the trial.
        rate: samples per second before the trial.
        closed: what was raised without a gain.
    """

    setting: LoaderSetting
    reason: str = ""
    raised: Raised | None = None
    before: LoaderSetting | None = None
    rate: float = 0.0
    closed: frozenset[Raised] = frozenset()

    def reject(self, reason: str) -> LoaderTuning:
        """Return the search with the setting before the trial."""
        assert self.raised is not None
        assert self.before is not None
        return LoaderTuning(self.before, reason, closed=self.closed | {self.raised})


def choose_setting(tuning: LoaderTuning, report: Report, limits: LoaderSetting) -> LoaderTuning:
    """Return the search after a report on steps with its setting; `limits` are the largest values to try."""
    found, totals, setting = report.bottleneck, report.totals, tuning.setting
    if totals.num_steps < MIN_STEPS:
        return replace(tuning, reason=f"{totals.num_steps} steps were measured, and {MIN_STEPS} are needed")
    if tuning.raised is not None and found.offered < (1 + _MIN_GAIN) * tuning.rate:
        return tuning.reject(
            f"{_text(tuning.raised, setting)} served {found.offered:,.0f} {found.unit}/s, not more than the "
            f"{tuning.rate:,.0f} before it"
        )
    kept = LoaderTuning(setting, closed=tuning.closed)
    if found.stage is None:
        return replace(kept, reason=f"the consumer is the limit, and waits {found.starved_share:.1%} of the time")
    if found.stage is not Stage.DECODE or not totals.num_bound_steps:
        return replace(kept, reason=f"{found.stage} is the limit, which threads and prefetch do not change")
    # If all batches are late, the threads are too slow; if some are, more in progress even that out.
    order: tuple[Raised, Raised] = ("num_threads", "prefetch")
    for name in order if is_thread_bound(totals) else order[::-1]:
        value = getattr(setting, name)
        if name not in kept.closed and value < getattr(limits, name):
            larger = replace(setting, **{name: min(2 * value or 2, getattr(limits, name))})
            waits = f"the consumer waits for decoding in {found.starved_share:.1%} of the time"
            return LoaderTuning(larger, f"{_text(name, larger)}: {waits}", name, setting, found.offered, kept.closed)
    return replace(kept, reason="decoding is the limit, and more threads or prefetch are not possible or no gain")


def _text(name: Raised, setting: LoaderSetting) -> str:
    return f"{name}={getattr(setting, name)}"
