"""Retention policy: a pure function that chooses the versions of a model to keep, from their entries.

The newest, the best and the tagged versions are always kept. No version is needed to restore another one: a tensor
table lists all objects of its tensors, so a tensor stored as a difference does not depend on the version of its base.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from datasvc.errors import ConfigError, ConflictError
from datasvc.models.registry.registry import ModelVersion, model_log
from datasvc.printable import count_text
from datasvc.repository import Repository
from datasvc.repository.logs.references import MetricMode, choose_metric_mode, finite_metrics, rank_by_metric
from datasvc.repository.removal import RemovalReport, remove_untagged, remove_versions, tags_on

# Lineage and the search for consumers read these fields of removed versions.
_KEPT_FIELDS: Final = ("data", "code", "history")


@dataclass(frozen=True)
class RetentionPolicy:
    """Which versions to keep, in addition to the newest, the best and the tagged ones.

    Attributes:
        last: number of newest versions to keep.
        best: number of best versions by `metric` to keep; None: 1 if there is a `metric`.
        metric: metric that defines "best"; None: for every metric, its highest and its lowest value count as best.
        mode: whether a high or a low `metric` is better; None: derived from its name, see `references`.
        every_versions: keep the versions whose number is a multiple of this.
        every_steps: keep the first version at or after each multiple of this number of steps.

    Raises:
        ConfigError: no count is given, a count is below 1, `best` or `mode` is given without a metric, or the name of
            the metric is unclear and `mode` is missing.
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
            raise ConfigError(f"the numbers of a retention policy must be 1 or more, not {wrong}")
        if not counts:
            raise ConfigError(
                "the retention policy keeps nothing; give the number of last versions, of best versions by a metric, "
                "or every n-th version or step"
            )
        if self.best is not None and self.metric is None:
            raise ConfigError("the retention policy keeps the best versions, but names no metric; give one")
        if self.metric is not None:
            object.__setattr__(self, "mode", choose_metric_mode(self.metric, self.mode))
        elif self.mode is not None:
            raise ConfigError(f"the mode {self.mode!r} is given without a metric; give the metric, or omit the mode")

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items() if value is not None)


@dataclass(frozen=True)
class RetentionPlan:
    """Versions of a model to keep, with the reasons by version number, and versions to remove; both ascending."""

    kept: Mapping[int, tuple[str, ...]]
    removed: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values. Version numbers become texts, because keys of JSON objects are texts."""
        return {
            "kept": {str(number): list(reasons) for number, reasons in self.kept.items()},
            "removed": list(self.removed),
        }


def plan_retention(versions: Sequence[ModelVersion], policy: RetentionPolicy) -> RetentionPlan:
    """Choose the versions of one model to keep, with the reasons; removed versions are ignored.

    Raises:
        ConfigError: no version has a finite value of the policy's metric. The message lists the metrics that exist.
    """
    living = sorted((version for version in versions if not version.removed), key=lambda version: version.version)
    reasons: dict[int, list[str]] = {version.version: [] for version in living}
    if living:
        reasons[living[-1].version].append("newest")
    for version in living:
        reasons[version.version].extend(f"tagged {tag}" for tag in version.tags)
    for version in living[-(policy.last or 0) :] if policy.last else []:
        reasons[version.version].append(f"last {policy.last}")
    for number, reason in [*_best(living, policy), *_every(living, policy)]:
        reasons[number].append(reason)
    return RetentionPlan(
        {number: tuple(why) for number, why in reasons.items() if why},
        tuple(number for number, why in reasons.items() if not why),
    )


def _best(living: Sequence[ModelVersion], policy: RetentionPolicy) -> Iterable[tuple[int, str]]:
    scores = {version.version: finite_metrics(version.entry.get("metrics")) for version in living}
    metrics = sorted({name for score in scores.values() for name in score})
    # Without a metric in the policy, it is unknown which value is better: keep the highest and the lowest.
    if policy.metric is None:
        for name in metrics:
            yield rank_by_metric(scores, name, "max")[0], f"highest {name}"
            yield rank_by_metric(scores, name, "min")[0], f"lowest {name}"
        return
    if living and policy.metric not in metrics:
        raise ConfigError(
            f"no version has a finite metric {policy.metric!r}, so none is the best; there are: "
            f"{', '.join(metrics) or 'none'}"
        )
    assert policy.mode is not None  # set together with the metric
    end = "highest" if policy.mode == "max" else "lowest"
    for place, number in enumerate(rank_by_metric(scores, policy.metric, policy.mode)[: policy.best or 1], 1):
        yield number, f"{end} {policy.metric}" if place == 1 else f"{end} {policy.metric}, place {place}"


def _every(living: Sequence[ModelVersion], policy: RetentionPolicy) -> Iterable[tuple[int, str]]:
    if policy.every_versions is not None:
        for version in living:
            if version.version % policy.every_versions == 0:
                yield version.version, f"every {count_text(policy.every_versions, 'version')}"
    if policy.every_steps is not None:
        seen = set()
        # Sorted by step, not by number: a run that resumes an earlier version passes the same steps again.
        for version in sorted(living, key=lambda version: (int(version.entry["step"]), version.version)):
            interval = int(version.entry["step"]) // policy.every_steps
            if interval not in seen:
                seen.add(interval)
                yield version.version, f"every {count_text(policy.every_steps, 'step')}"


def remove(repository: Repository, refs: Sequence[str], *, force: bool = False, message: str = "") -> RemovalReport:
    """Remove model versions, with one commit per model; for arguments and errors, see `remove_versions`."""
    return remove_versions(repository, "models", refs, force=force, message=message)


def retain(
    repository: Repository, name: str, policy: RetentionPolicy, *, dry_run: bool = True
) -> tuple[list[ModelVersion], RetentionPlan]:
    """Remove the versions of a model that a policy does not keep; with `dry_run`, only plan it.

    Returns:
        All versions that were not removed before, oldest first, and the plan for them.

    Raises:
        ConfigError, NotFoundError, CorruptDataError: see `plan_retention` and `Repository.entries`.
        ConflictError: another process tagged one of the versions to remove.
        UnknownOutcomeError, UnavailableError: see `Log.append`.
    """
    versions = [version for version in model_log(repository, name) if not version.removed]
    plan = plan_retention(versions, policy)
    if plan.removed and not dry_run:
        # The plan keeps every tagged version, so a tag on a version to remove was set after the log was read.
        tagged = tags_on(repository, "models", name, plan.removed)
        if tagged:
            raise ConflictError(f"another process moved tags of {name}: {tagged}; nothing was removed, plan again")
        remove_untagged(repository, "models", name, plan.removed, f"retain {policy}")
    return versions, plan


def kept_of_removed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return those fields of a removed version's entry whose objects `gc` keeps: consumed samples, and code."""
    return {field: entry[field] for field in _KEPT_FIELDS if field in entry}
