"""Merge: the next version of a data set from the splits of others. Shards are shared; nothing is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from datasvc.errors import ConfigError
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.references import check_name, parse_reference
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.combine import OnCommon, append_splits
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
    read_tables,
    read_val_fraction,
)

OnCommonKey = Literal["fail", "drop", "first", "last"]
"""What becomes of a key that several versions have: nothing is committed; equal samples are taken once and unequal
ones fail; the sample of the first version stays; that of the last does."""

_RULES: Final[dict[str, OnCommon]] = {"fail": "fail", "drop": "drop", "first": "keep", "last": "replace"}


@dataclass(frozen=True)
class MergeReport:
    """What a merge did.

    Attributes:
        version: the committed version.
        merged: the versions it was made from.
        num_samples: samples in each split.
        num_shards: shards in each split.
        size_bytes: bytes of all shards, most of them shared with the versions merged.
        overlaps: samples that two splits shared: left out with "drop".
    """

    version: Resolved
    merged: list[Resolved]
    num_samples: dict[str, int]
    num_shards: dict[str, int]
    size_bytes: int
    overlaps: Sequence[Overlap] = ()


def merge(
    repository: Repository,
    refs: Sequence[str],
    name: str,
    *,
    on_common: OnCommonKey = "fail",
    on_split_overlap: OnSplitOverlap = "fail",
    message: str = "",
) -> MergeReport:
    """Commit the next version of data set `name`: the samples of all `refs`, split by split.

    A reference to `name` itself without a version means whatever is the newest when the merge is committed, so that
    nothing is lost when others commit meanwhile.

    Args:
        repository: where all of them lie.
        refs: at least two versions; the first gives the order of columns and classes.
        name: of the data set, made when new.
        on_common: what becomes of a key that several have in one split.
        on_split_overlap: what becomes of samples that two splits of the result share, by key or by equal blobs.
        message: kept with the version.

    Raises:
        ConfigError: fewer than two references; columns or labels do not go together, see `combine.append_table`.
        NotFoundError: no such version.
        ConflictError: a key is in several, and `on_common` does not settle it; splits share samples, see
            `split_overlap.settle_overlaps`; or as `Log.append`.
        CorruptDataError, UnknownOutcomeError, UnavailableError: see `Log.append`, `Objects.read`.
    """
    check_name(name, "data set")
    if on_common not in _RULES:
        raise ConfigError(f"on_common is {on_common!r}; expected one of {', '.join(_RULES)}")
    if len(refs) < 2:
        raise ConfigError(f"a merge needs at least two versions; got {len(refs)}")
    check_on_overlap(on_split_overlap)
    build = _MergeBuild(repository, refs, name, _RULES[on_common], on_split_overlap, message)
    committed = repository.versions("datasets", name).append(build)
    tables = build.tables
    return MergeReport(
        version=Resolved("datasets", name, committed.number),
        merged=build.versions,
        num_samples={split: table.num_samples for split, table in tables.items()},
        num_shards={split: table.num_shards for split, table in tables.items()},
        size_bytes=sum(table.size_bytes for table in tables.values()),
        overlaps=build.overlaps,
    )


class _MergeBuild:
    """Builds the entry; called again when a commit was lost to another.

    Attributes:
        versions: merged by the last call.
        tables: what came of it, by split.
        overlaps: samples that splits shared.
    """

    def __init__(
        self,
        repository: Repository,
        refs: Sequence[str],
        name: str,
        on_common: OnCommon,
        on_overlap: OnSplitOverlap,
        message: str,
    ) -> None:
        self.versions = [repository.resolve("datasets", ref) for ref in refs]
        self.tables: dict[str, ShardTable] = {}
        self.overlaps: list[Overlap] = []
        self._repository = repository
        parsed = [parse_reference(ref) for ref in refs]
        # These mean the newest version of what is being committed, and follow it.
        self._moving = [
            place for place, ref in enumerate(parsed) if ref.name == name and ref.version is None and ref.tag is None
        ]
        self._name = name
        self._on_common = on_common
        self._on_overlap = on_overlap
        self._message = message

    def __call__(self, head: int) -> Mapping[str, Any]:
        own = Resolved("datasets", self._name, head)
        for place in self._moving:
            self.versions[place] = own
        objects = self._repository.objects
        merging = [read_tables(self._repository, version) for version in self.versions]
        self.tables = merging[0]
        for added in merging[1:]:
            self.tables = append_splits(objects, self.tables, added, on_common=self._on_common)
        before = [self._repository.entry(version).content for version in self.versions]
        # Only what one of them has within itself; not what comes of putting them together.
        accepted = [
            overlap
            for content, tables in zip(before, merging, strict=True)
            if accepted_counts(content)
            for overlap in find_overlaps(objects, tables)
        ]
        self.tables, shared, self.overlaps = settle_overlaps(
            objects, self.tables, self._on_overlap, accepted=accepted
        )
        merged = [str(version) for version in self.versions]
        return derived_entry(
            describe_tables(objects, self.tables, before=[table for tables in merging for table in tables.values()]),
            {"kind": "merge", "versions": merged},
            message=self._message,
            parent=own if own in self.versions else None,
            source=", ".join(merged),
            **{VAL_FRACTION: read_val_fraction(self._repository, own if own in self.versions else self.versions[0])},
            **{ENTRY_FIELD: shared},
        )
