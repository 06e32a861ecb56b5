"""Three-way merge of the samples of two versions, by key, relative to their common ancestors.

A sample that only one side has added, changed or deleted is taken from this side. If both sides did so, and the
results differ, the key is in conflict. The cost grows with the difference of the versions, see `diff`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.repository import Objects
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.combine import append_splits
from datasvc.shards.versions.dataset import Split
from datasvc.shards.versions.deletions import delete_samples, only_samples
from datasvc.shards.versions.diff import SplitDifference, diff_tables
from datasvc.shards.versions.labels import longest_list

Change = Literal["added", "changed", "deleted", "unchanged"]
Side = Literal["ours", "theirs"]
Splits = Mapping[str, Split]
Choose = Callable[[str], Side | None]
"""Returns which side a key in conflict is taken from; None: neither."""


@dataclass(frozen=True)
class MergeConflict:
    """A key that both sides changed, with different results.

    Attributes:
        split: name of the split.
        key: key of the sample.
        ours: what the line that is merged into did with the sample since the common ancestor.
        theirs: what the merged version did with it.
        taken: side that it is taken from; None if it is not settled.
    """

    split: str
    key: str
    ours: Change
    theirs: Change
    taken: Side | None = None


@dataclass
class SplitPlan:
    """What changes in one split of the line that is merged into.

    Attributes:
        takes_all: whether the split of the merged version is taken as it is: the line has not changed its own.
        num_added, num_changed, num_deleted: numbers of samples.
        taken: places of samples to add, (shard, row) in the table of the merged version; [] with `takes_all`.
        lost: places of samples to delete, because they are deleted or replaced, in the table of the line; likewise.
    """

    takes_all: bool = False
    num_added: int = 0
    num_changed: int = 0
    num_deleted: int = 0
    taken: list[tuple[int, int]] = field(default_factory=list)
    lost: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class MergePlan:
    """What a merge changes in the line that is merged into.

    Attributes:
        splits: by name, what changes in each split of the two versions.
        conflicts: the keys in conflict, by split.
    """

    splits: Mapping[str, SplitPlan]
    conflicts: Sequence[MergeConflict]

    def count(self, kind: Literal["added", "changed", "deleted"]) -> dict[str, int]:
        """Return the number of added, changed or deleted samples by split, without zeros."""
        counts = {split: getattr(plan, f"num_{kind}") for split, plan in self.splits.items()}
        return {split: count for split, count in counts.items() if count}


def plan_three_way(
    objects: Objects, ours: Splits, theirs: Splits, bases: Sequence[Splits], choose: Choose
) -> MergePlan:
    """Return what a merge of `theirs` changes in `ours`; `choose` settles a key in conflict.

    A key for which two of the common ancestors, `bases`, lead to different results is in conflict.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: a sample index or deletions object cannot be read.
    """
    splits: dict[str, SplitPlan] = {}
    conflicts: list[MergeConflict] = []
    for split in sorted({*ours, *theirs}):
        old = [base.get(split) for base in bases]
        planner = _SplitPlanner(objects, split, ours.get(split), theirs.get(split), old)
        splits[split] = planner.plan(choose)
        conflicts += planner.conflicts
    return MergePlan(splits, conflicts)


class _ChangedKeys:
    """The keys that a side has deleted and changed since a common ancestor."""

    def __init__(self, objects: Objects, base: Split | None, side: Split | None) -> None:
        self.deleted: set[str] = set()
        self.changed: set[str] = set()
        if base is not None and not _are_equal(base, side):
            difference = diff_tables(objects, base.table, _table(side))
            self.deleted, self.changed = set(difference.deleted), set(difference.changed)


_ChangesOf = Callable[[str, _ChangedKeys, _ChangedKeys], tuple[Change, Change]]


@dataclass
class _SplitPlanner:
    """Plans one split."""

    objects: Objects
    split: str
    ours: Split | None
    theirs: Split | None
    bases: Sequence[Split | None]
    conflicts: list[MergeConflict] = field(default_factory=list)

    def plan(self, choose: Choose) -> SplitPlan:
        """Return the plan, and record the conflicts."""
        if _are_equal(self.ours, self.theirs):
            return SplitPlan()
        difference = diff_tables(self.objects, _table(self.ours), _table(self.theirs))
        if all(_are_equal(base, self.ours) for base in self.bases):
            added, changed, deleted = map(len, (difference.added, difference.changed, difference.deleted))
            return SplitPlan(True, added, changed, deleted)
        plan = SplitPlan()
        self._since = [
            (_ChangedKeys(self.objects, base, self.ours), _ChangedKeys(self.objects, base, self.theirs))
            for base in self.bases
        ]
        for key, shard, row in difference.added.places():
            if self._settle(key, _only_theirs, choose) == "theirs":
                plan.num_added += 1
                plan.taken.append((shard, row))
        for key, shard, row in difference.deleted.places():
            if self._settle(key, _only_ours, choose) == "theirs":
                plan.num_deleted += 1
                plan.lost.append((shard, row))
        for key, place, place_in_ours in _changed(difference):
            if self._settle(key, _in_both, choose) == "theirs":
                plan.num_changed += 1
                plan.taken.append(place)
                plan.lost.append(place_in_ours)
        return plan

    def _settle(self, key: str, changes_of: _ChangesOf, choose: Choose) -> Side | None:
        """Return the side that a key is taken from, whose samples differ; record a conflict."""
        changes = [changes_of(key, ours, theirs) for ours, theirs in self._since]
        sides: set[Side | None] = {
            _SETTLED.get((ours != "unchanged", theirs != "unchanged")) for ours, theirs in changes
        }
        side = sides.pop() if len(sides) == 1 else None
        if side is None:
            side = choose(key)
            self.conflicts.append(MergeConflict(self.split, key, *changes[0], taken=side))
        return side


def _only_theirs(key: str, ours: _ChangedKeys, theirs: _ChangedKeys) -> tuple[Change, Change]:
    if key not in ours.deleted:
        return "unchanged", "added"  # no common ancestor has it
    return "deleted", "changed" if key in theirs.changed else "unchanged"


def _only_ours(key: str, ours: _ChangedKeys, theirs: _ChangedKeys) -> tuple[Change, Change]:
    theirs_change, ours_change = _only_theirs(key, theirs, ours)
    return ours_change, theirs_change


def _in_both(key: str, ours: _ChangedKeys, theirs: _ChangedKeys) -> tuple[Change, Change]:
    if key not in ours.changed and key not in theirs.changed:
        return "added", "added"  # the samples differ, so the common ancestor does not have the key
    return "changed" if key in ours.changed else "unchanged", "changed" if key in theirs.changed else "unchanged"


_SETTLED: Final[Mapping[tuple[bool, bool], Side]] = {(True, False): "ours", (False, True): "theirs"}


def _changed(difference: SplitDifference) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Yield each key whose samples differ, with the place of the sample in the second split and in the first."""
    before = difference.changed_from
    pairs = zip(before.shards.tolist(), before.rows.tolist(), strict=True)
    for (key, shard, row), place in zip(difference.changed.places(), pairs, strict=True):
        yield key, (shard, row), place


def apply_plan(objects: Objects, ours: Splits, theirs: Splits, plan: MergePlan) -> dict[str, ShardTable]:
    """Return the splits of `ours` with the changes of a plan. Only changed objects are stored.

    A split without changes keeps its table. A split that loses all its samples is left out.

    Raises:
        ConfigError: no sample is left; or columns or labels are incompatible, see `append_splits`.
        CorruptDataError, NotFoundError, UnavailableError: a shard or its sample index cannot be read.
    """
    kept: dict[str, ShardTable] = {}
    taken: dict[str, ShardTable] = {}
    for split, changes in plan.splits.items():
        own, other = _table(ours.get(split)), _table(theirs.get(split))
        if changes.takes_all:
            if other is not None:
                taken[split] = other
            continue
        if own is not None:
            left = delete_samples(objects, own, _rows_by_shard(changes.lost)) if changes.lost else own
            if left.num_samples:
                kept[split] = left
        if other is not None and (changes.taken or (split in kept and _extends(kept[split], other))):
            taken[split] = only_samples(objects, other, _rows_by_shard(changes.taken))
    merged = append_splits(objects, kept, taken)
    if not merged:
        raise ConfigError("no sample would be left: nothing was committed")
    return merged


def _table(split: Split | None) -> ShardTable | None:
    return None if split is None else split.table


def _are_equal(a: Split | None, b: Split | None) -> bool:
    return (None if a is None else a.digest) == (None if b is None else b.digest)


def _extends(own: ShardTable, other: ShardTable) -> bool:
    """Return whether the other side has class names or columns that this one lacks."""
    columns = set(other.sample_schema.names) - set(own.sample_schema.names)
    is_longer = longest_list([own.classes, other.classes]) != own.classes
    return bool(columns) or is_longer


def _rows_by_shard(places: Sequence[tuple[int, int]]) -> dict[int, Integers]:
    rows: dict[int, list[int]] = {}
    for shard, row in places:
        rows.setdefault(shard, []).append(row)
    return {shard: np.unique(np.array(numbers, np.int64)) for shard, numbers in sorted(rows.items())}
