"""Finds the sample of a batch that changed a metric, by short runs that each mask a half of the samples in question.

They continue the last version before the step. If the metric is as before the step, the sample is among those masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final

from datasvc.errors import ConfigError, NotFoundError
from datasvc.models.registry.ancestry import read_ancestry
from datasvc.replay.batch_at import ReplayedBatch, batch_at
from datasvc.repository import Repository
from datasvc.runs.reader import read_run, resolve_run

_BEFORE: Final = 20  # values of the metric before the step, whose median is the usual value


@dataclass(frozen=True)
class MaskedRun:
    """One short run.

    Attributes:
        masked: first and last index in the batch of the samples that it masks.
        value: the metric.
        is_usual: whether the metric is nearer to its value before the step than to that of the step.
    """

    masked: tuple[int, int]
    value: float
    is_usual: bool


@dataclass(frozen=True)
class BisectPlan:
    """What a search for a sample starts from.

    Attributes:
        batch: batch of the step.
        start: version to continue, the last one before the step; None: the run starts again from its beginning.
        metric: name of the metric.
        usual: its median in the steps before.
        spike: its value in the step.
    """

    batch: ReplayedBatch
    start: str | None
    metric: str
    usual: float
    spike: float

    @property
    def num_runs(self) -> int:
        """Largest number of short runs."""
        return math.ceil(math.log2(len(self.batch.keys)))

    def is_usual(self, value: float) -> bool:
        """Return whether a value of the metric is nearer to the usual one than to that of the step."""
        if not math.isfinite(self.spike):
            return math.isfinite(value)
        return abs(value - self.usual) < abs(value - self.spike)


def plan_bisect(repository: Repository, ref: str, step: int, metric: str = "loss") -> BisectPlan:
    """Return what a search starts from, for a step of a run.

    Raises:
        ConfigError: the log of the run has no such metric at the step, or its value there is the usual one; or the
            step was skipped.
        NotFoundError: there is no such run or step, or no version records it.
        CorruptDataError, UnavailableError: an entry, the log or an index cannot be read.
    """
    history = read_run(repository, *resolve_run(repository, ref))
    series = history.series.get(metric)
    if series is None:
        found = f"the metrics of its steps are {', '.join(sorted(history.series)) or 'none'}"
        if metric in history.evaluation:
            raise ConfigError(
                f"{metric!r} is a metric of evaluations, and many steps lie between two of them; {found}"
            )
        raise ConfigError(f"the run has no metric {metric!r}; {found}")
    values = dict(zip(series.steps, series.values, strict=True))
    before = [values[number] for number in sorted(values) if number < step and math.isfinite(values[number])]
    if step not in values or not before:
        raise ConfigError(
            f"the log of the run has no {metric} of step {step} and of a step before it; give a step that it has, "
            f"such as {max(values, key=values.__getitem__)}, or log each step with --report-every 1"
        )
    usual, spike = median(before[-_BEFORE:]), values[step]
    if spike == usual:
        raise ConfigError(f"{metric} of step {step} is {spike:g}, as before it: there is nothing to search for")
    batch = batch_at(repository, ref, step)
    if batch.step.batches is not None:
        raise ConfigError(
            f"the run had --leases in step {step}, and a short run of one process has other steps: search with "
            "datasvc.replay.bisect.find_sample and runs of your own, or in a run without --leases"
        )
    if (batch.is_masked | batch.is_purged).all():
        raise ConfigError(f"the run has skipped step {step}, or its samples were purged: no sample is left to name")
    return BisectPlan(batch, _version_before(repository, batch.step.version, step), metric, usual, spike)


def find_sample(
    plan: BisectPlan,
    run: Callable[[tuple[int, int]], float],
    progress: Callable[[MaskedRun], None] = lambda _: None,
) -> int:
    """Return the index in the batch of the sample that changed the metric.

    Args:
        plan: what to start from.
        run: continues `plan.start` with the samples between two indices of the batch masked, both included, and
            returns the metric of the step.
        progress: called after each run.
    """
    start, stop = 0, len(plan.batch.keys)
    while stop - start > 1:
        middle = (start + stop) // 2
        value = run((start, middle - 1))
        is_usual = plan.is_usual(value)
        progress(MaskedRun((start, middle - 1), value, is_usual))
        start, stop = (start, middle) if is_usual else (middle, stop)
    return start


def _version_before(repository: Repository, version: str, step: int) -> str | None:
    """Return the last version of a run before a step, from a later one; None: there is none any more."""
    ancestry = read_ancestry(repository, [version])
    model, newest = version.partition("@")[0], ancestry.versions[version]
    is_tuned = bool((newest.entry.get("config") or {}).get("init_from"))
    for found in (newest, *ancestry.ancestors_of(version)):
        if is_tuned and found.name.partition("@")[0] != model:
            break  # the pretrained version, from which the steps of this run count
        if found.step is None or found.step >= step:
            continue
        try:
            return str(repository.resolve("models", found.name))
        except NotFoundError:
            continue  # removed by retention, or in another repository: an older one does too
    return None
