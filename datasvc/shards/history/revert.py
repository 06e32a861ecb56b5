"""Revert a data set: commit the next version with the samples of an old one. No shard and no table is copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datasvc.errors import ConfigError
from datasvc.repository import Repository, Resolved, parse_reference
from datasvc.repository.branching import refuse_branch
from datasvc.repository.logs.references import LineName
from datasvc.shards.lines.commit import commit_on_line
from datasvc.shards.versions.dataset import open_dataset
from datasvc.shards.versions.split_overlap import ENTRY_FIELD
from datasvc.shards.versions.version_entry import VAL_FRACTION, derived_entry, read_val_fraction


@dataclass(frozen=True)
class RevertReport:
    """The result of `revert`.

    Attributes:
        version: the committed version; or the newest version, if it already had the splits of the old one.
        equal_to: the old version, which has the same splits.
        is_new: whether a version was committed.
    """

    version: Resolved
    equal_to: Resolved
    is_new: bool


def revert(repository: Repository, ref: str, *, branch: str | None = None, message: str = "") -> RevertReport:
    """Commit the next version of a data set with the splits of an old version.

    The versions between them stay. If the newest version has the same splits already, nothing is committed.

    Args:
        repository: the repository that stores the data set.
        ref: the old version, with a number or a tag.
        branch: branch to commit to; None: the main line, whatever line the old version is on.
        message: text stored with the version.

    Raises:
        ConfigError: `ref` is a name alone, or a branch.
        NotFoundError: there is no such version or branch, or the version was removed.
        ConflictError, CorruptDataError, UnknownOutcomeError, UnavailableError: see `Log.append`, `open_dataset`.
    """
    reference = parse_reference(ref)
    if reference.version is None and reference.tag is None:
        raise ConfigError(f"{ref!r} names no version; expected the version to return to, such as {ref}@3")
    advice = f"give the number of the version to return to; `datasvc merge {reference.name} {ref}` merges the branch"
    refuse_branch(repository, reference.name, reference.tag, advice)
    old = repository.resolve("datasets", ref)
    content = open_dataset(repository, str(old)).entry.content
    val_fraction = read_val_fraction(repository, old)

    def build(newest: Resolved | None) -> Mapping[str, Any]:
        # Called again after a commit by another writer: the new version continues that commit.
        if newest is not None and open_dataset(repository, str(newest)).entry.content["splits"] == content["splits"]:
            raise _AlreadyEqualError(newest)
        return derived_entry(
            content["splits"],
            {"kind": "revert", "to": str(old)},
            message=message,
            parent=newest,
            source=str(old),
            **{VAL_FRACTION: val_fraction},
            **{name: content[name] for name in (ENTRY_FIELD,) if name in content},  # the overlaps of its splits
        )

    try:
        committed = commit_on_line(repository, LineName(old.name, branch), build)
    except _AlreadyEqualError as equal:
        return RevertReport(equal.version, old, is_new=False)
    return RevertReport(Resolved("datasets", old.name, committed.number), old, is_new=True)


class _AlreadyEqualError(Exception):
    """Ends `commit_on_line` without a commit: the newest version has the splits of the old one."""

    def __init__(self, version: Resolved) -> None:
        self.version = version
