"""Merge a branch: commit the changes of a version since the common ancestor to another line of the same data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from datasvc.errors import ConfigError, ConflictError
from datasvc.printable import count_text
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.heads import MERGED
from datasvc.repository.logs.references import LineName, parse_line, refuse_text
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.history.three_way import MergeConflict, MergePlan, Side, apply_plan, plan_three_way
from datasvc.shards.lines.commit import commit_on_line, find_common_ancestors, head_of_line
from datasvc.shards.versions.dataset import DatasetVersion, read_version
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
    read_val_fraction,
)

OnConflict = Literal["fail", "ours", "theirs"]
"""Rule for a key that both sides changed, with different results. "fail" raises ConflictError. "ours" keeps the
sample, or the deletion, of the line that is merged into; "theirs" takes that of the merged version."""
_MAX_LISTED: Final = 10


@dataclass(frozen=True)
class BranchMergeReport:
    """The result of `merge_branch`.

    Attributes:
        version: the committed version; if nothing was committed, the newest version of the line.
        ours: the version of the line that was merged into.
        theirs: the version that was merged.
        bases: their newest common ancestors.
        is_new: whether a version was committed.
        added: number of samples that were added to the line, by split; `changed` and `deleted` in the same way.
        changed: number of samples that were replaced.
        deleted: number of samples that were deleted.
        conflicts: keys that both sides changed, and how each was settled. In a dry run, also those that are not
            settled.
        overlaps: samples that two splits share since this merge.
        label_conflicts: samples of both sides that are equal and have contradicting labels.
    """

    version: Resolved
    ours: Resolved
    theirs: Resolved
    bases: tuple[Resolved, ...]
    is_new: bool
    added: Mapping[str, int] = field(default_factory=dict)
    changed: Mapping[str, int] = field(default_factory=dict)
    deleted: Mapping[str, int] = field(default_factory=dict)
    conflicts: Sequence[MergeConflict] = ()
    overlaps: Sequence[Overlap] = ()
    label_conflicts: Sequence[LabelConflict] = ()


def merge_branch(
    repository: Repository,
    ref: str,
    into: str,
    *,
    on_conflict: OnConflict = "fail",
    ours: Iterable[str] = (),
    theirs: Iterable[str] = (),
    base: str | None = None,
    on_split_overlap: OnSplitOverlap = "fail",
    dry_run: bool = False,
    message: str = "",
) -> BranchMergeReport:
    """Commit what a version changed since the common ancestor to another line of its data set.

    It is a three-way merge by split and sample key: a sample that only one side has added, changed or deleted is
    taken from this side. No shard is copied, unless labels change. If the line has `ref` among its ancestors, nothing
    is committed, unless `base` is given and there are changes. If another writer commits to the line first, the merge
    is made again with this commit.

    Args:
        repository: the repository that stores the data set.
        ref: the version to merge: NAME@BRANCH, or NAME to bring the main line into a branch, or any version.
        into: line to commit to: NAME, or NAME@BRANCH.
        on_conflict: rule for keys that both sides changed, with different results.
        ours: keys in conflict for which `on_conflict` is "ours".
        theirs: keys in conflict for which it is "theirs".
        base: version relative to which changes are computed, instead of the newest common ancestors; with it, changes
            that were merged before and reverted are merged again.
        on_split_overlap: rule for samples that two splits share because of the merge, by key or by equal blobs.
        dry_run: only return the changes and conflicts, and commit nothing.
        message: text stored with the version.

    Raises:
        ConfigError: `ref` and `into` are of different data sets; they have no common ancestor, and `base` is not
            given; a key is in `ours` and `theirs`; no sample would be left; or columns or labels are incompatible,
            see `combine.append_table`.
        NotFoundError: there is no such version or branch.
        ConflictError: keys are in conflict, and no rule settles them (the message lists up to ten); splits share
            samples, see `split_overlap.settle_overlaps`; or see `Log.append`.
        CorruptDataError, UnknownOutcomeError, UnavailableError: see `Log.append`, `Objects.read`.
    """
    line, merged = parse_line(into), repository.resolve("datasets", ref)
    if on_conflict not in get_args(OnConflict):
        raise ConfigError(f"on_conflict is {on_conflict!r}; expected one of {', '.join(get_args(OnConflict))}")
    check_on_overlap(on_split_overlap)
    if merged.name != line.name:
        raise ConfigError(
            f"{ref} and {into} are of different data sets, so they have no common ancestor; this takes all their "
            f"samples: `datasvc combine {line} {into} {ref}`"
        )
    given_base = None if base is None else repository.resolve("datasets", base, removed=True)
    sides = _SidesByKey.of(on_conflict, ours, theirs)
    build = _BranchMergeBuild(repository, line, merged, given_base, sides, on_split_overlap, message)
    if dry_run:
        head = head_of_line(repository, line, repository.versions("datasets", line.name).head())
        with suppress(_NothingToMergeError):
            build.compare(head)
        return build.report(build.ours, is_new=False)
    try:
        committed = commit_on_line(repository, line, build)
    except _NothingToMergeError:
        return build.report(build.ours, is_new=False)
    return build.report(Resolved("datasets", line.name, committed.number), is_new=True)


class _NothingToMergeError(Exception):
    """Ends `commit_on_line` without a commit: the line has the merged version already."""


@dataclass(frozen=True)
class _SidesByKey:
    """Which side keys in conflict are taken from."""

    default: Side | None
    by_key: Mapping[str, Side]

    @classmethod
    def of(cls, on_conflict: OnConflict, ours: Iterable[str], theirs: Iterable[str]) -> _SidesByKey:
        refuse_text(ours, "ours", "keys")
        refuse_text(theirs, "theirs", "keys")
        our_keys, their_keys = set(ours), set(theirs)
        if both := sorted(our_keys & their_keys):
            raise ConfigError(f"the key {both[0]!r} is to be taken from both sides; give it once")
        by_key: dict[str, Side] = dict.fromkeys(our_keys, "ours")
        return cls(None if on_conflict == "fail" else on_conflict, by_key | dict.fromkeys(their_keys, "theirs"))

    def __call__(self, key: str) -> Side | None:
        return self.by_key.get(key, self.default)


@dataclass(eq=False)
class _BranchMergeBuild:
    """Builds the log entry. `commit_on_line` calls an instance again if the line has another version by then.

    Attributes:
        ours: the version of the line that the last call merged into.
        bases: the common ancestors of both versions.
        plan: what the merge changes, and the conflicts.
        overlaps, label_conflicts: see `BranchMergeReport`.
    """

    repository: Repository
    line: LineName
    theirs: Resolved
    given_base: Resolved | None
    sides: _SidesByKey
    on_overlap: OnSplitOverlap
    message: str
    ours: Resolved = field(init=False)
    bases: list[Resolved] = field(default_factory=list)
    plan: MergePlan = field(default_factory=lambda: MergePlan({}, ()))
    overlaps: Sequence[Overlap] = ()
    label_conflicts: Sequence[LabelConflict] = ()

    def compare(self, ours: Resolved | None) -> tuple[DatasetVersion, DatasetVersion]:
        """Plan the merge into `ours`; return the versions of both sides."""
        if ours is None:
            raise ConfigError(
                f"{self.line} has no version to merge into; `datasvc revert {self.theirs}` commits one with these "
                "samples"
            )
        self.ours, self.plan, self.overlaps, self.label_conflicts = ours, MergePlan({}, ()), (), ()
        self.bases = find_common_ancestors(self.repository, ours, self.theirs)
        has_theirs = self.theirs in self.bases
        if self.given_base is not None:
            self.bases = [self.given_base]
        elif has_theirs:
            raise _NothingToMergeError
        if not self.bases:
            raise ConfigError(
                f"{ours} and {self.theirs} have no common ancestor in this repository, so it is not known which side "
                f"changed a sample; give the version that both come from: --base {ours.name}@NUMBER (base=)"
            )
        versions = [read_version(self.repository, version) for version in (ours, self.theirs, *self.bases)]
        splits = [dict(version) for version in versions]
        self.plan = plan_three_way(self.repository.objects, splits[0], splits[1], splits[2:], self.sides)
        if has_theirs and not self.plan.conflicts and not any(map(self.plan.count, _KINDS)):
            self.bases = [self.theirs]
            raise _NothingToMergeError
        return versions[0], versions[1]

    def __call__(self, parent: Resolved | None) -> Mapping[str, Any]:
        ours, theirs = self.compare(parent)
        self._refuse_conflicts()
        if self.bases == [ours.resolved]:
            # The line has not changed since the common ancestor: all is as on the other side, byte for byte.
            splits = dict(theirs.entry.content["splits"])
            shared = accepted_counts(theirs.entry.content)
        else:
            splits, shared = self._merge(ours, theirs)
        change: dict[str, Any] = {
            "kind": "merge",
            "bases": [str(base) for base in self.bases],
            **{kind: by_split for kind in _KINDS if (by_split := self.plan.count(kind))},
        }
        if taken := Counter(conflict.taken for conflict in self.plan.conflicts):
            change["conflicts"] = {side: taken[side] for side in ("ours", "theirs") if taken[side]}
        return derived_entry(
            splits,
            change,
            message=self.message,
            parent=ours.resolved,
            source=f"{ours.resolved}, {theirs.resolved}",
            **{MERGED: [str(theirs.resolved)], VAL_FRACTION: self._val_fraction()},
            **({} if shared is None else {ENTRY_FIELD: dict(shared)}),
        )

    def report(self, version: Resolved, *, is_new: bool) -> BranchMergeReport:
        """Return the report of the last call."""
        return BranchMergeReport(
            version,
            self.ours,
            self.theirs,
            tuple(self.bases),
            is_new,
            added=self.plan.count("added"),
            changed=self.plan.count("changed"),
            deleted=self.plan.count("deleted"),
            conflicts=self.plan.conflicts,
            overlaps=self.overlaps,
            label_conflicts=self.label_conflicts,
        )

    def _merge(self, ours: DatasetVersion, theirs: DatasetVersion) -> tuple[dict[str, Any], Mapping[str, int] | None]:
        """Return the description of the merged splits, and the numbers of samples that they share."""
        objects = self.repository.objects
        tables: dict[str, ShardTable] = apply_plan(objects, dict(ours), dict(theirs), self.plan)
        old = {name: split.table for name, split in ours.items()}
        accepted = accepted_counts(ours.entry.content)
        # What two splits of one side share was accepted when it was committed, or is no error. Only the samples that
        # the merge brings together are compared.
        checked = old if accepted is not None else None
        known: list[Overlap] = []
        if find_overlaps(objects, tables, checked=checked):
            known = find_overlaps(objects, {name: split.table for name, split in theirs.items()})
            known += [] if checked else find_overlaps(objects, old)
        tables, shared, self.overlaps = settle_overlaps(
            objects,
            tables,
            self.on_overlap,
            accepted=known,
            checked=checked,
            keys_are_places=all(has_place_keys(self.repository, side.resolved) for side in (ours, theirs)),
        )
        self.label_conflicts = find_label_conflicts(objects, tables, checked=old)
        changed = {split: table for split, table in tables.items() if table is not old.get(split)}
        before = [split.table for side in (ours, theirs) for split in side.values()]
        descriptions = {
            split: ours.entry.content["splits"][split] for split in tables if split not in changed
        } | describe_tables(objects, changed, before=before)
        return descriptions, dict(Counter(shared) + Counter(accepted or {}))

    def _val_fraction(self) -> float:
        """Return the fraction of `train` to hold out: that of the side that changed it."""
        ours, theirs, base = (
            read_val_fraction(self.repository, version) for version in (self.ours, self.theirs, self.bases[0])
        )
        if ours in (theirs, base) or theirs == base or self.sides.default is not None:
            return theirs if ours == base or (theirs != base and self.sides.default == "theirs") else ours
        raise ConflictError(
            f"{self.ours} holds out {ours:g} as 'val', {self.theirs} {theirs:g}, and {self.bases[0]} {base:g}: "
            "choose with --on-conflict ours or theirs"
        )

    def _refuse_conflicts(self) -> None:
        """Raise ConflictError if a conflict is not settled."""
        left = [conflict for conflict in self.plan.conflicts if conflict.taken is None]
        if not left:
            return
        sides = [
            f"{each.split}/{each.key}: {each.ours} in {self.ours}, {each.theirs} in {self.theirs}"
            for each in left[:_MAX_LISTED]
        ]
        num_more = len(left) - _MAX_LISTED
        more = [f"... and {num_more:,} more; --dry-run --json lists all"] if num_more > 0 else []
        bases = ", ".join(map(str, self.bases))
        num_keys = count_text(len(left), "key was", "keys were")
        head = f"{num_keys} changed on both sides since {bases}, with different results; nothing was committed:"
        advice = (
            f"take them from {self.line} with --on-conflict ours, from {self.theirs} with --on-conflict theirs, or "
            "some keys from each with --ours FILE and --theirs FILE (on_conflict=, ours=, theirs=)"
        )
        raise ConflictError("\n".join([head, *sides, *more, advice]))


_KINDS: Final[tuple[Literal["added", "changed", "deleted"], ...]] = ("added", "changed", "deleted")
