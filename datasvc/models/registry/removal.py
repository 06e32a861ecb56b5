"""Removing versions of models. A version is removed by a commit of its own; its bytes go with a later `gc`.

What stays of it: its number, which is never used again, and its entry, so that what it came from can still be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from datasvc.errors import ConfigError, ConflictError, DatasvcError, NotFoundError
from datasvc.models.registry.registry import ModelVersion, model_log
from datasvc.models.registry.retention import RetentionPlan, RetentionPolicy, plan_retention
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.references import parse_reference

_KEPT: Final = ("data", "code", "history")


@dataclass(frozen=True)
class RemovalReport:
    """What was removed.

    Attributes:
        versions: in the order of their names and numbers.
        untagged: tags that were taken away first, "digits-cnn@prod".
    """

    versions: tuple[Resolved, ...]
    untagged: tuple[str, ...]


def remove(repository: Repository, refs: Sequence[str], *, force: bool = False, message: str = "") -> RemovalReport:
    """Remove model versions. Several of one model go in one commit; those of another model in one of its own.

    Args:
        repository: where they lie.
        refs: each with a version or a tag: a name alone is refused, it could mean one version or all.
        force: take away the tags that stand on them first.
        message: kept with the removal.

    Raises:
        ConfigError: a name alone, or a tagged version without `force`; nothing was removed.
        NotFoundError: a version is not there, or removed already; nothing was removed.
        ConflictError: a tag was moved onto or from one of them at this moment; says what was removed. The tags that
            were taken away are back on the versions that are not.
        UnknownOutcomeError, UnavailableError: see `Log.append`; tags are put back as far as the store lets them.
    """
    wanted: dict[str, set[int]] = {}
    for ref in refs:
        named = parse_reference(ref, "model")
        if named.version is None and named.tag is None:
            raise ConfigError(f"{ref!r} does not say which versions: name each, such as {ref}@3")
        version = repository.resolve("models", ref)
        wanted.setdefault(version.name, set()).add(version.version)
    tags = {name: _tags_on(repository, name, versions) for name, versions in wanted.items()}
    if not force:
        _refuse_tagged(tags)
    done: list[str] = []
    for name, versions in wanted.items():
        try:
            _remove_tagged(repository, name, versions, tags[name], message)
        except ConflictError as error:
            before = f"; removed before, with their tags: {', '.join(done)}" if done else ""
            raise ConflictError(f"{error}{before}") from error
        done += [f"{name}@{number}" for number in sorted(versions)]
    return RemovalReport(
        tuple(Resolved("models", name, number) for name in sorted(wanted) for number in sorted(wanted[name])),
        tuple(f"{name}@{tag}" for name, standing in tags.items() for tag in standing),
    )


def retain(
    repository: Repository, name: str, policy: RetentionPolicy, *, dry_run: bool = True
) -> tuple[list[ModelVersion], RetentionPlan]:
    """Remove the versions of a model that a policy does not keep.

    Args:
        repository: where it lies.
        name: of the model.
        policy: what to keep.
        dry_run: remove nothing, only say what would be.

    Returns:
        The versions that the plan is about, oldest first; and the plan.

    Raises:
        ConfigError, NotFoundError, CorruptDataError: see `plan_retention` and `Repository.entries`.
        ConflictError: a version was tagged at this moment; nothing was removed, plan again.
        UnknownOutcomeError, UnavailableError: see `Log.append`.
    """
    versions = [each for each in model_log(repository, name) if not each.removed]
    plan = plan_retention(versions, policy)
    if plan.removed and not dry_run:
        tagged = _tags_on(repository, name, set(plan.removed))
        if tagged:
            raise ConflictError(f"tags of {name} were moved meanwhile: {tagged}; nothing was removed, plan again")
        _remove_untagged(repository, name, set(plan.removed), f"retain {policy}")
    return versions, plan


def swept_versions(repository: Repository, name: str, before_s: float) -> frozenset[int]:
    """Return the versions of a model whose objects `gc` need not keep.

    Args:
        repository: where it lies.
        name: of the model.
        before_s: versions that were removed later are kept still: somebody may be reading them.

    Raises:
        CorruptDataError, UnavailableError: see `Log.read`.
    """
    removed = repository.removals("models", name).removed_before(before_s)
    # Tags last: a removal that is taken back for a tag is taken back after that tag was set.
    return removed - set(repository.tags("models", name).values()) if removed else removed


def kept_of_removed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a removed version's entry still names objects to keep: which samples it saw, by which code."""
    return {field: entry[field] for field in _KEPT if field in entry}


def _remove_tagged(
    repository: Repository, name: str, versions: Iterable[int], tags: Mapping[str, int], message: str
) -> None:
    """Remove versions of one model after their tags; who fails puts the tags of those back that are still there."""
    taken: dict[str, int] = {}
    try:
        for tag, number in tags.items():
            try:
                repository.untag("models", name, tag, expect=number)
            except (ConflictError, NotFoundError) as error:
                raise ConflictError(f"{name}@{tag} was moved meanwhile; no version of {name} was removed") from error
            taken[tag] = number
        _remove_untagged(repository, name, versions, message)
    except DatasvcError:
        for tag, number in taken.items():
            with suppress(DatasvcError):  # the version is removed, or somebody else has set the tag by now
                repository.tag("models", f"{name}@{number}", tag, expect=0)
        raise


def _remove_untagged(repository: Repository, name: str, versions: Iterable[int], message: str) -> None:
    removals = repository.removals("models", name)
    removals.add(versions, message)
    # `Repository.tag` looks at the removals after it moved a tag: of the two at least one sees the other.
    tagged = _tags_on(repository, name, versions)
    if tagged:
        back = set(tagged.values())
        removals.give_back(back, f"tagged meanwhile: {', '.join(sorted(tagged))}")
        raise ConflictError(
            f"tags were moved while versions of {name} were removed: {tagged} stay, the others are removed"
        )


def _tags_on(repository: Repository, name: str, versions: Iterable[int]) -> dict[str, int]:
    wanted = set(versions)
    return {tag: version for tag, version in repository.tags("models", name).items() if version in wanted}


def _refuse_tagged(tags: Mapping[str, Mapping[str, int]]) -> None:
    standing = [f"{name}@{number} is {name}@{tag}" for name, each in tags.items() for tag, number in each.items()]
    if standing:
        raise ConfigError(
            f"{', '.join(standing)}; nothing was removed: move the tags first, or take them away as well with --force"
        )
