"""What is different between two data-set versions, sample by sample. Exact, and cheap where they share shards.

Samples that both hold in the same shard are never looked at, whatever else is deleted there: the bitmaps tell. Of the
others the sample indexes are read. Labels are compared by what they mean: where the class names disagree, the second
version's labels are renumbered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from datasvc.keyed_random import Integers
from datasvc.repository import Objects, Repository, Resolved
from datasvc.shards.format.schema import LABEL
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.deletions import load_deletions
from datasvc.shards.versions.key_join import match_keys
from datasvc.shards.versions.keys import SampleRows, SplitKeys
from datasvc.shards.versions.labels import combine_classes, plan_labels
from datasvc.shards.versions.version_entry import read_tables


class Keys:
    """Keys of one split, counted; read when they are iterated over, in table order.

    Args:
        side: the split.
        without: samples of `side` that are left out.
        only: when given, nothing but these samples.
    """

    def __init__(self, side: SplitKeys, *, without: SampleRows | None = None, only: SampleRows | None = None) -> None:
        self._side = side
        self._without = without.by_shard() if without is not None else {}
        self._only = only.by_shard() if only is not None else None
        left_out = 0 if without is None else len(without)
        self._count = side.num_samples - left_out if only is None else len(only)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        """Yield the keys. Raises CorruptDataError, NotFoundError, UnavailableError."""
        shards = self._side.shards.tolist() if self._only is None else list(self._only)
        for shard in shards:
            if len(self._without.get(shard, ())) == len(self._side.live_rows(shard)):
                continue
            each = self._side.read(shard)
            if self._only is None:
                wanted = np.isin(each.rows, self._without.get(shard, np.empty(0, np.int64)), invert=True)
            else:
                wanted = np.isin(each.rows, self._only[shard])
            yield from each.keys.filter(pa.array(wanted)).to_pylist()


@dataclass(frozen=True)
class SplitDifference:
    """What leads from one split to another.

    Attributes:
        added: keys that only the second has.
        deleted: keys that only the first has.
        changed: keys that both have, with different samples.
        unchanged: number of samples that are equal in both.
        columns_added: types of the columns that only the second has.
        columns_removed: types of those that only the first has.
        columns_retyped: types of those that differ, first and second.
        classes_added: class names that only the second has, sorted.
        classes_removed: those that only the first has, sorted.
    """

    added: Keys
    deleted: Keys
    changed: Keys
    unchanged: int
    columns_added: Mapping[str, str]
    columns_removed: Mapping[str, str]
    columns_retyped: Mapping[str, tuple[str, str]]
    classes_added: tuple[str, ...]
    classes_removed: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """What leads from version `a` to version `b`.

    Attributes:
        a: the first version.
        b: the second.
        splits: by split, sorted, those of one version only too: all their samples are added, or deleted.
        splits_added: splits that only `b` has.
        splits_removed: splits that only `a` has.
    """

    a: Resolved
    b: Resolved
    splits: Mapping[str, SplitDifference]
    splits_added: tuple[str, ...]
    splits_removed: tuple[str, ...]


def diff(repository: Repository, a: str, b: str) -> Difference:
    """Return what leads from version `a` to version `b`, which may be of different data sets.

    Raises:
        ConfigError, NotFoundError: see `Repository.resolve`.
        CorruptDataError, UnavailableError: a table, index or deletions object cannot be read.
    """
    first, second = (repository.resolve("datasets", ref) for ref in (a, b))
    ours, theirs = (read_tables(repository, version) for version in (first, second))
    splits = {
        split: diff_tables(repository.objects, ours.get(split), theirs.get(split))
        for split in sorted({*ours, *theirs})
    }
    return Difference(
        first, second, splits, tuple(sorted(set(theirs) - set(ours))), tuple(sorted(set(ours) - set(theirs)))
    )


def diff_tables(objects: Objects, a: ShardTable | None, b: ShardTable | None) -> SplitDifference:
    """Return what leads from split `a` to split `b`; None has no samples. Raises as `diff`."""
    a, b = _or_empty(a, b), _or_empty(b, a)
    labels = plan_labels(b.classes, combine_classes(a.classes, [b.classes]))
    ours, others, shared = _unshared(objects, a, b, labels)
    common = match_keys(ours, others)
    types_a, types_b = ({column.name: str(column.type) for column in table.sample_schema} for table in (a, b))
    return SplitDifference(
        added=Keys(others, without=common.b),
        deleted=Keys(ours, without=common.a),
        changed=Keys(others, only=common.b[~common.equal]),
        unchanged=shared + int(common.equal.sum()),
        columns_added={name: found for name, found in types_b.items() if name not in types_a},
        columns_removed={name: found for name, found in types_a.items() if name not in types_b},
        columns_retyped={
            name: (types_a[name], types_b[name])
            for name in types_a
            if name in types_b and types_a[name] != types_b[name]
        },
        classes_added=tuple(sorted(set(b.classes) - set(a.classes))),
        classes_removed=tuple(sorted(set(a.classes) - set(b.classes))),
    )


def _unshared(
    objects: Objects, a: ShardTable, b: ShardTable, labels: Mapping[int, int]
) -> tuple[SplitKeys, SplitKeys, int]:
    """Return the samples of either side that the other does not hold in the same shard, and how many they share."""
    if labels and LABEL in b.sample_schema.names:
        return SplitKeys(objects, a), SplitKeys(objects, b, labels=labels), 0
    sides = [SplitKeys(objects, table) for table in (a, b)]
    bitmaps = [load_deletions(objects, table).bitmap for table in (a, b)]
    numbers: tuple[list[int], list[int]] = ([], [])
    without: tuple[dict[int, Integers], dict[int, Integers]] = ({}, {})
    num_live = a.samples_per_shard
    shared = 0
    partners = find_partners(a, b)
    for mine, theirs in partners.items():
        if bitmaps[0](mine) == bitmaps[1](theirs):
            shared += int(num_live[mine])
            continue
        # The same file with other samples deleted: the bitmaps tell them apart, no key need be read.
        live = [side.live_rows(shard) for side, shard in zip(sides, (mine, theirs), strict=True)]
        both = np.intersect1d(live[0], live[1], assume_unique=True)
        shared += len(both)
        for place, shard in enumerate((mine, theirs)):
            if len(live[place]) > len(both):
                numbers[place].append(shard)
                without[place][shard] = both
    numbers[0].extend(set(range(a.num_shards)) - partners.keys())
    numbers[1].extend(set(range(b.num_shards)) - set(partners.values()))
    ours, others = (
        SplitKeys(objects, table, sorted(numbers[place]), without=without[place])
        for place, table in enumerate((a, b))
    )
    return ours, others, shared


def find_partners(a: ShardTable, b: ShardTable) -> dict[int, int]:
    """Return the shards of `a` that `b` has too, and their numbers there; each shard has one partner at most."""
    places: dict[bytes, list[int]] = {}
    for number, digest in enumerate(b.rows.column("digest").to_pylist()):
        places.setdefault(digest, []).append(number)
    partners = {}
    for number, digest in enumerate(a.rows.column("digest").to_pylist()):
        if places.get(digest):
            partners[number] = places[digest].pop(0)
    return partners


def _or_empty(table: ShardTable | None, other: ShardTable | None) -> ShardTable:
    if table is not None:
        return table
    assert other is not None
    return ShardTable.build([], other.sample_schema, other.classes)
