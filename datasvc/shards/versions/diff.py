"""Exact difference of two data-set versions, sample by sample.

The cost grows with the difference: for shards that both versions have, only the deletion bitmaps are compared. Sample
indexes are read for the other shards only. Labels are compared by class name: the labels of the second version are
first renumbered to those that the first version has for the same classes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, repeat
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.keyed_random import Integers
from datasvc.repository import Objects, Repository, Resolved
from datasvc.shards.format.overlays import DIGEST_FIELD
from datasvc.shards.format.schema import LABEL
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.deletions import load_deletions
from datasvc.shards.versions.describe import count_classes
from datasvc.shards.versions.keys import SampleRows, SplitKeys, match_keys
from datasvc.shards.versions.labels import combine_classes, plan_labels, sort_pairs
from datasvc.shards.versions.version_entry import read_tables
from datasvc.shown import Shown

_MAX_PAIRS: Final = 100  # of classes, in JSON with a limited number of keys


class LabelChange(NamedTuple):
    """A sample whose class differs: its key, and the two classes, or labels without class names; "" for none."""

    key: str
    old: str
    new: str


class Keys:
    """Keys of one split. `len` does not read them; an iteration reads them shard by shard, in table order.

    Args:
        split: the split.
        without: samples of `split` to leave out.
        only: samples of `split` to take; None for all. Give at most one of `without` and `only`.
    """

    def __init__(
        self, split: SplitKeys, *, without: SampleRows | None = None, only: SampleRows | None = None
    ) -> None:
        self.split = split
        self._without = without.by_shard() if without is not None else {}
        self._only = only.by_shard() if only is not None else None
        self._count = len(only) if only is not None else split.num_samples - len(without or ())

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        """Yield the keys. Raise CorruptDataError, NotFoundError, UnavailableError."""
        return (key for key, _, _ in self.places())

    def places(self) -> Iterator[tuple[str, int, int]]:
        """Yield each key with its shard, and its row in the shard's file; for errors, see `__iter__`."""
        shards = self.split.shards.tolist() if self._only is None else list(self._only)
        for shard in shards:
            # If every live sample of the shard is left out, its sample index need not be read.
            if len(self._without.get(shard, ())) == len(self.split.live_rows(shard)):
                continue
            shard_keys = self.split.read(shard)
            if self._only is None:
                selected = np.isin(shard_keys.rows, self._without.get(shard, np.empty(0, np.int64)), invert=True)
            else:
                selected = np.isin(shard_keys.rows, self._only[shard])
            keys = shard_keys.keys.filter(pa.array(selected)).to_pylist()
            yield from zip(keys, repeat(shard), shard_keys.rows[selected].tolist(), strict=False)


@dataclass(frozen=True)
class SplitDifference:
    """Changes from a first split to a second one.

    Attributes:
        added: keys that only the second has.
        deleted: keys that only the first has.
        changed: keys that both have, with different samples; their places are those in the second.
        changed_from: places of the changed samples in the first, in the order of `changed`.
        unchanged: number of samples that are equal in both.
        columns_added: types of the columns that only the second has.
        columns_removed: types of the columns that only the first has.
        columns_retyped: for each column whose types differ, its type in the first and in the second.
        classes_added: class names that only the second has, sorted.
        classes_removed: class names that only the first has, sorted.
        class_counts: number of samples in the first and in the second, by name of each class where they differ; {}
            if a split does not count its labels.
        class_distance: drift of the classes: total variation distance of the two distributions, 0 (equal) to 1 (no
            class in common); None if a split is empty or does not count its labels.
    """

    added: Keys
    deleted: Keys
    changed: Keys
    changed_from: SampleRows
    unchanged: int
    columns_added: Mapping[str, str]
    columns_removed: Mapping[str, str]
    columns_retyped: Mapping[str, tuple[str, str]]
    classes_added: tuple[str, ...]
    classes_removed: tuple[str, ...]
    class_counts: Mapping[str, tuple[int, int]]
    class_distance: float | None

    @cached_property
    def relabelled_places(self) -> list[tuple[LabelChange, int, int]]:
        """Each of `relabelled` with its shard in the second split, and its row in the shard's file."""
        places = list(self.changed.places())
        shards, rows = (np.array([place[part] for place in places], np.int64) for part in (1, 2))
        before, after = self.deleted.split, self.added.split  # the first split and the second
        old = before.labels(self.changed_from.shards, self.changed_from.rows)
        pairs = zip(places, old, after.labels(shards, rows), strict=True)
        return [(LabelChange(key, old, new), shard, row) for (key, shard, row), old, new in pairs if old != new]

    @property
    def relabelled(self) -> list[LabelChange]:
        """The changed samples with another class, in the order of `changed`; reads the labels of all changed ones."""
        return [change for change, _, _ in self.relabelled_places]

    @cached_property
    def confusion(self) -> list[tuple[str, str, int]]:
        """How many samples of `relabelled` went from one class to another, the most frequent pair first."""
        return sort_pairs(Counter((change.old, change.new) for change in self.relabelled))

    def to_json(self, max_keys: int | None = 10) -> dict[str, Any]:
        """Return JSON values, with at most `max_keys` keys of each kind, and 100 pairs of classes (None: all)."""
        kinds = {"added": self.added, "deleted": self.deleted, "changed": self.changed}
        relabelled, pairs = self.relabelled, self.confusion[: None if max_keys is None else _MAX_PAIRS]
        return {
            **{kind: len(keys) for kind, keys in kinds.items()},
            "unchanged": self.unchanged,
            "relabelled": len(relabelled),
            "labels": [change._asdict() for change in relabelled[:max_keys]],
            "confusion": [{"old": old, "new": new, "samples": count} for old, new, count in pairs],
            "keys": {kind: list(islice(keys, max_keys)) for kind, keys in kinds.items()},
            "columns_added": dict(self.columns_added),
            "columns_removed": dict(self.columns_removed),
            "columns_retyped": {name: list(types) for name, types in self.columns_retyped.items()},
            "classes_added": list(self.classes_added),
            "classes_removed": list(self.classes_removed),
            "class_counts": {name: list(counts) for name, counts in self.class_counts.items()},
            "class_distance": self.class_distance,
        }


@dataclass(frozen=True)
class Difference(Shown):
    """Changes from version `a` to version `b`.

    Attributes:
        a: the first version.
        b: the second version.
        splits: changes by split name, sorted. All samples of a split that one version lacks are added or deleted.
        splits_added: splits that only `b` has.
        splits_removed: splits that only `a` has.
    """

    a: Resolved
    b: Resolved
    splits: Mapping[str, SplitDifference]
    splits_added: tuple[str, ...]
    splits_removed: tuple[str, ...]

    def to_json(self, max_keys: int | None = 10) -> dict[str, Any]:
        """Return JSON values as `datasvc diff --json` prints them, with at most `max_keys` keys of each kind."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "splits": {split: changes.to_json(max_keys) for split, changes in self.splits.items()},
            "splits_added": list(self.splits_added),
            "splits_removed": list(self.splits_removed),
        }


def diff(repository: Repository, a: str, b: str) -> Difference:
    """Return the changes from version `a` to version `b`, which may belong to different data sets.

    Raises:
        ConfigError, NotFoundError: see `Repository.resolve`.
        CorruptDataError, UnavailableError: a shard table, sample index or deletions object cannot be read.
    """
    first, second = (repository.resolve("datasets", ref) for ref in (a, b))
    return diff_versions(repository, first, second)


def diff_versions(repository: Repository, first: Resolved, second: Resolved) -> Difference:
    """Return the changes between two versions, which may be removed; for errors, see `diff`."""
    tables_a, tables_b = (read_tables(repository, version) for version in (first, second))
    splits = {
        split: diff_tables(repository.objects, tables_a.get(split), tables_b.get(split))
        for split in sorted({*tables_a, *tables_b})
    }
    return Difference(
        first,
        second,
        splits,
        tuple(sorted(set(tables_b) - set(tables_a))),
        tuple(sorted(set(tables_a) - set(tables_b))),
    )


def diff_tables(objects: Objects, a: ShardTable | None, b: ShardTable | None) -> SplitDifference:
    """Return the changes from split `a` to split `b`; None stands for an empty split. Raise what `diff` raises."""
    a, b = _or_empty(a, b), _or_empty(b, a)
    # Map each label of `b` to the label that its class has in `a`; classes that `a` does not have get new labels.
    labels = plan_labels(b.classes, combine_classes(a.classes, [b.classes]))
    unshared_a, unshared_b, num_shared = _unshared(objects, a, b, labels)
    # Pairs of unshared samples with equal keys. The key of any other unshared sample exists on one side only.
    common = match_keys(unshared_a, unshared_b)
    types_a, types_b = ({column.name: str(column.type) for column in table.sample_schema} for table in (a, b))
    return SplitDifference(
        added=Keys(unshared_b, without=common.b),
        deleted=Keys(unshared_a, without=common.a),
        changed=Keys(unshared_b, only=common.b[~common.equal]),
        changed_from=common.a[~common.equal],
        unchanged=num_shared + int(common.equal.sum()),
        columns_added={name: column_type for name, column_type in types_b.items() if name not in types_a},
        columns_removed={name: column_type for name, column_type in types_a.items() if name not in types_b},
        columns_retyped={
            name: (types_a[name], types_b[name])
            for name in types_a
            if name in types_b and types_a[name] != types_b[name]
        },
        classes_added=tuple(sorted(set(b.classes) - set(a.classes))),
        classes_removed=tuple(sorted(set(a.classes) - set(b.classes))),
        class_counts=_class_counts(a, b),
        class_distance=_class_distance(a, b),
    )


def count_unshared(a: ShardTable, b: ShardTable) -> int:
    """Return the number of samples in shards that only one of two splits has: what `diff` reads indexes of."""
    partners = find_partners(a, b)
    shared = sum(int(a.stored_per_shard[number]) + int(b.stored_per_shard[partners[number]]) for number in partners)
    return int(a.stored_per_shard.sum() + b.stored_per_shard.sum()) - shared


def _class_counts(a: ShardTable, b: ShardTable) -> dict[str, tuple[int, int]]:
    """Return the number of samples of each class on both sides where they differ; {} if a side does not count."""
    if any(table.num_samples and not table.label_counts for table in (a, b)):
        return {}
    first, second = (count_classes(table.label_counts, table.classes) for table in (a, b))
    both = {name: (first.get(name, 0), second.get(name, 0)) for name in {**first, **second}}
    return {name: counts for name, counts in both.items() if counts[0] != counts[1]}


def _class_distance(a: ShardTable, b: ShardTable) -> float | None:
    """Return half the sum of the differences of the shares of each class; None if a side has no counts."""
    first, second = (count_classes(table.label_counts, table.classes) for table in (a, b))
    totals = sum(first.values()), sum(second.values())
    if not all(totals):
        return None
    shares = [abs(first.get(name, 0) / totals[0] - second.get(name, 0) / totals[1]) for name in {**first, **second}]
    return round(math.fsum(shares) / 2, 6)


def _unshared(
    objects: Objects, a: ShardTable, b: ShardTable, labels: Mapping[int, int]
) -> tuple[SplitKeys, SplitKeys, int]:
    """Return the samples of each side that are not live in a shard of both, and the number of the others."""
    if labels and LABEL in b.sample_schema.names:
        # Renumbered labels change the samples of `b`, so equal shards do not have equal samples.
        return SplitKeys(objects, a), SplitKeys(objects, b, labels=labels), 0
    sides = [SplitKeys(objects, table) for table in (a, b)]
    bitmaps = [load_deletions(objects, table).bitmap for table in (a, b)]
    shards_to_compare: tuple[list[int], list[int]] = ([], [])
    rows_to_skip: tuple[dict[int, Integers], dict[int, Integers]] = ({}, {})
    num_live = a.samples_per_shard
    num_shared = 0
    partners = find_partners(a, b)
    for shard_a, shard_b in partners.items():
        differing = _differing_rows(objects, (a, shard_a), (b, shard_b))
        if bitmaps[0](shard_a) == bitmaps[1](shard_b) and not len(differing):
            num_shared += int(num_live[shard_a])
            continue
        # The same file with other deletions or overlays: a sample that is live on one side only is not shared.
        live = [side.live_rows(shard) for side, shard in zip(sides, (shard_a, shard_b), strict=True)]
        live_in_both = np.setdiff1d(np.intersect1d(live[0], live[1], assume_unique=True), differing)
        num_shared += len(live_in_both)
        for side, shard in enumerate((shard_a, shard_b)):
            if len(live[side]) > len(live_in_both):
                shards_to_compare[side].append(shard)
                rows_to_skip[side][shard] = live_in_both
    shards_to_compare[0].extend(set(range(a.num_shards)) - partners.keys())
    shards_to_compare[1].extend(set(range(b.num_shards)) - set(partners.values()))
    unshared_a, unshared_b = (
        SplitKeys(objects, table, sorted(shards_to_compare[side]), without=rows_to_skip[side])
        for side, table in enumerate((a, b))
    )
    return unshared_a, unshared_b, num_shared


def _differing_rows(objects: Objects, a: tuple[ShardTable, int], b: tuple[ShardTable, int]) -> Integers:
    """Return the rows of a shard of both tables whose samples an overlay makes differ: `int64[n]`, ascending."""
    sides = [table.overlay(objects, number) for table, number in (a, b)]
    if all(side is None for side in sides) or _are_one(a, b):
        return np.empty(0, np.int64)
    num_samples = int(a[0].stored_per_shard[a[1]])
    # Null where neither the one nor the other overlay has a digest: there, both have that of the index.
    digests = [
        pa.nulls(num_samples, DIGEST_FIELD.type) if side is None else side.digests(None, num_samples)
        for side in sides
    ]
    equal = pc.fill_null(pc.equal(*digests), fill_value=False)
    both_null = pc.and_(digests[0].is_null(), digests[1].is_null())
    return np.flatnonzero(~pc.or_(equal, both_null).to_numpy(zero_copy_only=False))


def _are_one(a: tuple[ShardTable, int], b: tuple[ShardTable, int]) -> bool:
    """Return whether the same objects are the overlays of a shard of both tables."""
    numbers = [int(table.overlay_numbers[number]) for table, number in (a, b)]
    if min(numbers) < 0:
        return False
    (first, in_first), (second, in_second) = (
        each[0].overlays.find(number) for each, number in zip((a, b), numbers, strict=True)
    )
    return in_first == in_second and a[0].overlays.groups[first] == b[0].overlays.groups[second]


def find_partners(a: ShardTable, b: ShardTable) -> dict[int, int]:
    """Match the shards that both tables have: return the number in `b` by the number in `a`."""
    numbers_in_b: dict[bytes, list[int]] = {}
    for number, digest in enumerate(b.rows.column("digest").to_pylist()):
        numbers_in_b.setdefault(digest, []).append(number)
    partners = {}
    for number, digest in enumerate(a.rows.column("digest").to_pylist()):
        if numbers_in_b.get(digest):
            # A shard may occur several times in a table; each occurrence is matched only once.
            partners[number] = numbers_in_b[digest].pop(0)
    return partners


def _or_empty(table: ShardTable | None, other: ShardTable | None) -> ShardTable:
    """Return `table`; if it is None, an empty one with the columns and classes of `other`."""
    if table is not None:
        return table
    assert other is not None, "at least one of two versions has the split"
    return ShardTable.build([], other.sample_schema, other.classes)
