"""Keys and contents that occur more than once in a split, found from its sample indexes.

What is held for each sample is a hash of eight bytes; only samples whose hashes meet are compared as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from datasvc.keyed_random import Integers
from datasvc.repository import Objects
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.sources.common.source import BadSample
from datasvc.shards.versions.deletions import delete_samples

RepeatedBy = Literal["key", "payload"]
_INDEXES_AT_ONCE: Final = 8


@dataclass(frozen=True)
class Repeat:
    """A sample that repeats an earlier one of its split.

    Attributes:
        key: of the sample.
        first_key: of the earliest sample like it, in table order.
        shard: number of its shard.
        row: its place there.
    """

    key: str
    first_key: str
    shard: int
    row: int


@dataclass(frozen=True)
class Repeats:
    """What repeats in new splits.

    Attributes:
        keys: by split, samples that have the key of an earlier one.
        payloads: by split, other samples that hold the same as an earlier one.
    """

    keys: Mapping[str, Sequence[Repeat]]
    payloads: Mapping[str, Sequence[Repeat]]

    @classmethod
    def find(cls, objects: Objects, tables: Mapping[str, ShardTable], *, by_key: bool) -> Repeats:
        """Look for repeats in each split; for those of keys only with `by_key`. Raises as `find_repeats`."""
        keys: dict[str, list[Repeat]] = {}
        payloads: dict[str, list[Repeat]] = {}
        for split, table in tables.items():
            found = find_repeats(objects, table, "key") if by_key else []
            places = {(repeat.shard, repeat.row) for repeat in found}
            keys[split] = found
            payloads[split] = find_repeats(objects, table, "payload", without=places)
        return cls(_without_empty(keys), _without_empty(payloads))

    @property
    def bad(self) -> list[BadSample]:
        """Samples that cannot stay, since a key is unique in its split."""
        return [
            BadSample(split, repeat.key, "another sample of its split has this key: rename it")
            for split, repeats in self.keys.items()
            for repeat in repeats
        ]


def drop_repeats(
    objects: Objects, tables: Mapping[str, ShardTable], dropped: Sequence[Mapping[str, Sequence[Repeat]]]
) -> dict[str, ShardTable]:
    """Return the tables with these samples deleted: which one stays does not depend on who found it first."""
    left = {}
    for split, table in tables.items():
        rows: dict[int, list[int]] = {}
        for repeat in (repeat for repeats in dropped for repeat in repeats.get(split, ())):
            rows.setdefault(repeat.shard, []).append(repeat.row)
        chosen = {shard: np.array(sorted(each), np.int64) for shard, each in rows.items()}
        left[split] = delete_samples(objects, table, chosen) if chosen else table
    return left


def find_repeats(
    objects: Objects, table: ShardTable, by: RepeatedBy, *, without: Collection[tuple[int, int]] = ()
) -> list[Repeat]:
    """Return every sample that repeats an earlier one, in table order.

    Args:
        objects: of the repository.
        table: in which nothing is deleted, and every shard has a sample index.
        by: "key", or "payload": the digest of what a sample holds, see `digests`.
        without: samples that do not count, by shard and place in it.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: an index cannot be read.
    """
    hashes = np.empty(int(table.stored_per_shard.sum()), np.int64)
    start = 0
    for index in _read_indexes(objects, table, range(table.num_shards)):
        hashes[start : start + index.num_samples] = _hash(index, by)
        start += index.num_samples
    suspects = _meeting(hashes)
    del hashes
    stops = np.cumsum(table.stored_per_shard)
    shards = np.searchsorted(stops, suspects, side="right")
    rows = suspects - np.concatenate([[0], stops])[shards]
    counted = [place not in without for place in zip(shards.tolist(), rows.tolist(), strict=True)]
    return _compare(objects, table, by, shards[counted], rows[counted])


def _compare(objects: Objects, table: ShardTable, by: RepeatedBy, shards: Integers, rows: Integers) -> list[Repeat]:
    first: dict[str | bytes, str] = {}
    repeats: list[Repeat] = []
    affected = np.unique(shards).tolist()
    for shard, index in zip(affected, _read_indexes(objects, table, affected), strict=True):
        keys = index.keys
        for row in rows[shards == shard].tolist():
            value = keys[row] if by == "key" else index.digests("payload")[row].tobytes()
            if value in first:
                repeats.append(Repeat(keys[row], first[value], shard, row))
            else:
                first[value] = keys[row]
    return repeats


def _read_indexes(objects: Objects, table: ShardTable, shards: range | list[int]) -> Iterator[SampleIndex]:
    def read(shard: int) -> SampleIndex:
        digest = table.index(shard)
        assert digest is not None, shard
        return SampleIndex.decode(objects.read(digest), objects.location(digest))

    with ThreadPoolExecutor(_INDEXES_AT_ONCE, thread_name_prefix="datasvc-index") as pool:
        for start in range(0, len(shards), _INDEXES_AT_ONCE):
            yield from pool.map(read, shards[start : start + _INDEXES_AT_ONCE])


def _hash(index: SampleIndex, by: RepeatedBy) -> Integers:
    if by == "key":
        # Python's own hash: keyed anew in every process, so nobody can prepare keys that meet.
        return np.fromiter(map(hash, index.keys), np.int64, index.num_samples)
    digests = index.digests("payload")
    return np.ascontiguousarray(digests).view(np.int64)[::2] if len(digests) else np.empty(0, np.int64)


def _meeting(hashes: Integers) -> Integers:
    """Return the places whose hash occurs more than once, ascending: `int64[n]`."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    same = ordered[1:] == ordered[:-1]
    met = np.concatenate([[False], same]) | np.concatenate([same, [False]])
    return np.sort(order[met[: len(order)]])


def _without_empty(repeats: Mapping[str, list[Repeat]]) -> dict[str, list[Repeat]]:
    return {split: found for split, found in repeats.items() if found}
