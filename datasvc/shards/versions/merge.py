"""Merge: commit the next version of a data set from several versions. Shards are shared unless labels change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from datasvc.errors import ConfigError
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.references import LineName, parse_line, refuse_text
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.lines.commit import commit_on_line
from datasvc.shards.sources.common.options import check_key_prefix
from datasvc.shards.versions.combine import OnCommon, append_splits, prefix_shards
from datasvc.shards.versions.label_conflicts import LabelConflict, find_label_conflicts
from datasvc.shards.versions.split_overlap import (
    ENTRY_FIELD,
    OnSplitOverlap,
    Overlap,
    accepted_counts,
    check_on_overlap,
    find_overlaps,
    settle_overlaps,
)
from datasvc.shards.versions.version_entry import (
    VAL_FRACTION,
    derived_entry,
    describe_tables,
    has_place_keys,
    read_tables,
    read_val_fraction,
)

OnCommonKey = Literal["fail", "drop", "first", "last"]
"""Rule for a key that several versions have. "fail" raises ConflictError. "drop" keeps one sample if all are equal,
and raises ConflictError otherwise. "first" and "last" keep the sample of the first or last version with the key."""

# The rule of `combine.append_splits` for each rule of a merge, which appends one version after the other.
_RULES: Final[dict[str, OnCommon]] = {"fail": "fail", "drop": "drop", "first": "keep", "last": "replace"}


@dataclass(frozen=True)
class MergeReport:
    """The result of `merge`.

    Attributes:
        version: the committed version.
        merged: the versions it was made from.
        num_samples: number of samples by split.
        num_shards: number of shards by split.
        size_bytes: bytes of all shards, most of which are shared with the merged versions.
        overlaps: samples that two splits share, except those that a merged version accepted; "drop" left them out.
        label_conflicts: equal samples with contradicting labels that the merge brought together.
    """

    version: Resolved
    merged: list[Resolved]
    num_samples: dict[str, int]
    num_shards: dict[str, int]
    size_bytes: int
    overlaps: Sequence[Overlap] = ()
    label_conflicts: Sequence[LabelConflict] = ()


def merge(
    repository: Repository,
    refs: Sequence[str],
    name: str,
    *,
    on_common: OnCommonKey = "fail",
    on_split_overlap: OnSplitOverlap = "fail",
    key_prefixes: Mapping[str, str] | None = None,
    message: str = "",
) -> MergeReport:
    """Commit the next version of data set `name`, with the samples of all `refs`, split by split.

    All samples of all versions are taken. `merge` of branches is for the changes that were made on one.

    A reference to `name` without a version or tag means the newest version at the time of the commit, so samples that
    other writers add during the merge are included.

    Args:
        repository: the repository that stores all versions.
        refs: two versions or more; the first one determines the order of columns and classes.
        name: the data set to commit to, created if it does not exist; or NAME@BRANCH.
        on_common: rule for a key that several versions have in the same split.
        on_split_overlap: if two splits of the result share samples, by key or by equal blobs: "fail" commits nothing,
            "drop" leaves them out of training, "keep" keeps both.
        key_prefixes: text to put before each key of a version, by its reference in `refs`; the shards of these
            versions are stored again.
        message: text stored with the version.

    Raises:
        ConfigError: fewer than two references are given; `key_prefixes` has another reference; or columns or
            labels are incompatible, see `combine.append_table`.
        NotFoundError: there is no such version.
        ConflictError: several versions have a key, and `on_common` does not resolve it; splits share samples, see
            `split_overlap.settle_overlaps`; or see `Log.append`.
        CorruptDataError, UnknownOutcomeError, UnavailableError: see `Log.append`, `Objects.read`.
    """
    line = parse_line(name)
    refuse_text(refs, "refs")
    if on_common not in _RULES:
        raise ConfigError(f"on_common is {on_common!r}; expected one of {', '.join(_RULES)}")
    if len(refs) < 2:
        raise ConfigError(f"expected at least two versions to combine; got {len(refs)}")
    check_on_overlap(on_split_overlap)
    prefixes = {ref: check_key_prefix(prefix) for ref, prefix in (key_prefixes or {}).items()}
    if unknown := sorted(prefixes.keys() - set(refs)):
        raise ConfigError(
            f"there is a key prefix for {unknown[0]!r}, which is not merged; expected one of {', '.join(refs)}"
        )
    build = _MergeBuild(repository, refs, line, _RULES[on_common], on_split_overlap, prefixes, message)
    committed = commit_on_line(repository, line, build)
    tables = build.tables
    return MergeReport(
        version=Resolved("datasets", line.name, committed.number),
        merged=build.versions,
        num_samples={split: table.num_samples for split, table in tables.items()},
        num_shards={split: table.num_shards for split, table in tables.items()},
        size_bytes=sum(table.size_bytes for table in tables.values()),
        overlaps=build.overlaps,
        label_conflicts=build.label_conflicts,
    )


@dataclass(eq=False)
class _MergeBuild:
    """Builds the log entry. `commit_on_line` calls an instance again if another writer committed first.

    Attributes:
        line: what to commit to.
        repository, refs, on_overlap, prefixes, message: as in `merge`.
        on_common: rule of `append_splits`, see `_RULES`.
        versions: the versions that the last call merged.
        tables: shard tables of the last call's result by split.
        overlaps, label_conflicts: see `MergeReport`.
    """

    repository: Repository
    refs: Sequence[str]
    line: LineName
    on_common: OnCommon
    on_overlap: OnSplitOverlap
    prefixes: Mapping[str, str]
    message: str
    tables: dict[str, ShardTable] = field(default_factory=dict)
    overlaps: list[Overlap] = field(default_factory=list)
    label_conflicts: Sequence[LabelConflict] = ()

    def __post_init__(self) -> None:
        # Resolved once: a tag that moves between two attempts must not change what is merged.
        self.versions = [self.repository.resolve("datasets", ref) for ref in self.refs]

    def __call__(self, parent: Resolved | None) -> Mapping[str, Any]:
        for position, ref in enumerate(self.refs):
            # A reference to the line means the version that this attempt continues. Without one, none resolves to it.
            if ref == str(self.line) and parent is not None:
                self.versions[position] = parent
        objects = self.repository.objects
        stored_tables = [read_tables(self.repository, version) for version in self.versions]
        tables_by_version = [
            {split: prefix_shards(objects, table, self.prefixes.get(ref, "")) for split, table in tables.items()}
            for ref, tables in zip(self.refs, stored_tables, strict=True)
        ]
        self.tables = tables_by_version[0]
        # Versions are appended in the order of the references, which defines "first" and "last".
        for added in tables_by_version[1:]:
            self.tables = append_splits(objects, self.tables, added, on_common=self.on_common)
        contents = [self.repository.entry(version).content for version in self.versions]
        # Only overlaps within one merged version were accepted; overlaps that the merge creates were not. A log entry
        # has only the number of accepted samples, so the samples are searched for again.
        accepted = [
            overlap
            for content, tables in zip(contents, tables_by_version, strict=True)
            if accepted_counts(content)
            for overlap in find_overlaps(objects, tables)
        ]
        self.tables, shared, self.overlaps = settle_overlaps(
            objects,
            self.tables,
            self.on_overlap,
            accepted=accepted,
            keys_are_places=all(has_place_keys(self.repository, version) for version in self.versions),
        )
        self.label_conflicts = find_label_conflicts(objects, self.tables, checked=tables_by_version[0])
        merged_tables = [table for tables in stored_tables for table in tables.values()]
        merged_refs = [str(version) for version in self.versions]
        change: dict[str, Any] = {"kind": "merge", "versions": merged_refs}
        if any(self.prefixes.values()):
            change["key_prefixes"] = [self.prefixes.get(ref, "") for ref in self.refs]
        # The new version continues the newest version of `name` only if that version was merged too.
        continued = parent if parent in self.versions else None
        return derived_entry(
            describe_tables(objects, self.tables, before=merged_tables),
            change,
            message=self.message,
            parent=continued,
            source=", ".join(merged_refs),
            **{VAL_FRACTION: read_val_fraction(self.repository, continued or self.versions[0]), ENTRY_FIELD: shared},
        )
