"""Removes versions of models: those that are named, or those that a policy does not keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from datasvc.errors import ConflictError
from datasvc.models.registry.registry import ModelVersion, model_log
from datasvc.models.registry.retention import RetentionPlan, RetentionPolicy, plan_retention
from datasvc.repository import Repository
from datasvc.repository.removal import RemovalReport, remove_untagged, remove_versions, tags_on

# Lineage and the search for consumers read these fields of removed versions.
_KEPT_FIELDS: Final = ("data", "code", "history")


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
