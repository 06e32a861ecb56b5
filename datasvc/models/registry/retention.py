"""Which versions of a model to keep: decided from what their entries say, and nothing is touched here.

Whatever the policy, the newest version, the best and the tagged ones stay. No version is needed to restore another:
every tensor table names all that its tensors are made of, so a difference never keeps its base's version.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasvc.errors import ConfigError
from datasvc.models.registry.metric_mode import MetricMode, choose_metric_mode
from datasvc.models.registry.registry import ModelVersion


@dataclass(frozen=True)
class RetentionPolicy:
    """What to keep beside the newest version, the best one and the tagged ones.

    Attributes:
        last: so many of the newest.
        best: so many of the best by `metric`.
        metric: what "best" means. Without it both the highest and the lowest of every metric count as best.
        mode: whether a high or a low `metric` is better; None: as its name says, see `metric_mode`.
        every_versions: those whose number is a multiple of this.
        every_steps: the first at or after each multiple of so many steps.

    Raises:
        ConfigError: it keeps nothing but what always stays; or which end of `metric` is the best is not known.
    """

    last: int | None = None
    best: int | None = None
    metric: str | None = None
    mode: MetricMode | None = None
    every_versions: int | None = None
    every_steps: int | None = None

    def __post_init__(self) -> None:
        counts = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        wrong = {name: value for name, value in counts.items() if value < 1}
        if wrong:
            raise ConfigError(f"a retention policy counts from 1, not {wrong}")
        if not counts:
            raise ConfigError("say what to keep: the last so many, the best by a metric, or every n-th")
        if self.best is not None and self.metric is None:
            raise ConfigError("say by which metric versions are best")
        if self.metric is not None:
            object.__setattr__(self, "mode", choose_metric_mode(self.metric, self.mode))
        elif self.mode is not None:
            raise ConfigError(f"the mode {self.mode!r} is of no metric: say which, or leave it out")

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items() if value is not None)


@dataclass(frozen=True)
class RetentionPlan:
    """What becomes of every version that is not removed yet.

    Attributes:
        kept: why each stays, by its number, ascending.
        removed: the numbers of the others, ascending.
    """

    kept: Mapping[int, tuple[str, ...]]
    removed: tuple[int, ...]


def plan_retention(versions: Sequence[ModelVersion], policy: RetentionPolicy) -> RetentionPlan:
    """Return which versions of one model a policy keeps, and why.

    Args:
        versions: of the model, by number, in any order; removed ones are left out.
        policy: what to keep.

    Raises:
        ConfigError: no version has the policy's metric, so nobody knows the best; says which metrics there are.
    """
    living = sorted((each for each in versions if not each.removed), key=lambda each: each.version)
    reasons: dict[int, list[str]] = {each.version: [] for each in living}
    if living:
        reasons[living[-1].version].append("newest")
    for each in living:
        reasons[each.version].extend(f"tagged {tag}" for tag in each.tags)
    for each in living[-(policy.last or 0) :] if policy.last else []:
        reasons[each.version].append(f"last {policy.last}")
    for number, reason in [*_best(living, policy), *_every(living, policy)]:
        reasons[number].append(reason)
    return RetentionPlan(
        {number: tuple(why) for number, why in reasons.items() if why},
        tuple(number for number, why in reasons.items() if not why),
    )


def _best(living: Sequence[ModelVersion], policy: RetentionPolicy) -> Iterable[tuple[int, str]]:
    scores = {each.version: _numbers(each.entry.get("metrics")) for each in living}
    metrics = sorted({name for score in scores.values() for name in score})
    if policy.metric is None:
        for name in metrics:
            yield _ranked(scores, name, "max")[0], f"highest {name}"
            yield _ranked(scores, name, "min")[0], f"lowest {name}"
        return
    if living and policy.metric not in metrics:
        raise ConfigError(
            f"no version has a finite metric {policy.metric!r}, so none is the best; there are: "
            f"{', '.join(metrics) or 'none'}"
        )
    assert policy.mode is not None  # there is a metric
    word = "highest" if policy.mode == "max" else "lowest"
    for place, number in enumerate(_ranked(scores, policy.metric, policy.mode)[: policy.best or 1], 1):
        yield number, f"{word} {policy.metric}" if place == 1 else f"{word} {policy.metric}, place {place}"


def _ranked(scores: Mapping[int, Mapping[str, float]], metric: str, mode: str) -> list[int]:
    """Return versions from the best on; of equals the newest first."""
    sign = -1 if mode == "max" else 1
    return sorted(
        (number for number, score in scores.items() if metric in score),
        key=lambda number: (sign * scores[number][metric], -number),
    )


def _every(living: Sequence[ModelVersion], policy: RetentionPolicy) -> Iterable[tuple[int, str]]:
    if policy.every_versions is not None:
        for each in living:
            if each.version % policy.every_versions == 0:
                yield each.version, f"every {policy.every_versions} versions"
    if policy.every_steps is not None:
        seen = set()
        # By their steps: runs that were resumed from an earlier version pass the same steps again.
        for each in sorted(living, key=lambda each: (int(each.entry["step"]), each.version)):
            span = int(each.entry["step"]) // policy.every_steps
            if span not in seen:
                seen.add(span)
                yield each.version, f"every {policy.every_steps} steps"


def _numbers(metrics: Any) -> dict[str, float]:
    """Return the metrics that can be compared: a NaN is never the best."""
    given = metrics.items() if isinstance(metrics, Mapping) else ()
    return {
        str(name): float(value)
        for name, value in given
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
