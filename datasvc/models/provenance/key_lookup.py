"""Where given keys lie in many shard tables: one look at each sample index, however many tables share the shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.errors import NotFoundError
from datasvc.keyed_random import Integers
from datasvc.repository import Digest, ObjectInfo, Objects
from datasvc.shards.format.reader import open_shard
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import KEY
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.deletions import Deletions, load_deletions

_READS_AT_ONCE = 8


@dataclass(frozen=True)
class KeyPlaces:
    """Where some keys lie in one split.

    Attributes:
        keys: `int64[n]`, number of each key that is there, among those asked for.
        shards: `int64[n]`, number of its shard in the table.
        rows: `int64[n]`, its row there, deleted samples left out: what an access order means.
        num_lost: shards whose keys, or what was deleted of them, are not here.
    """

    keys: Integers
    shards: Integers
    rows: Integers
    num_lost: int = 0

    @classmethod
    def join(cls, parts: Sequence[KeyPlaces]) -> KeyPlaces:
        """Return the places of several sets of keys in one split."""
        return cls(
            _joined(each.keys for each in parts),
            _joined(each.shards for each in parts),
            _joined(each.rows for each in parts),
            sum(each.num_lost for each in parts),
        )


@dataclass(frozen=True)
class _Hits:
    """Keys that a shard stores: `int64[n]` each, numbers of keys and stored rows, rows ascending."""

    keys: Integers
    rows: Integers


def find_places(
    objects: Objects,
    tables: Mapping[Digest, ShardTable],
    keys: Sequence[str],
    *,
    shards: frozenset[Digest] | None = None,
) -> dict[Digest, KeyPlaces]:
    """Return where keys lie in each of some splits; samples that a split has deleted are not there.

    Args:
        objects: of the repository.
        tables: the splits, by the digests of their tables.
        keys: each once.
        shards: look in these only; None: in all.

    Raises:
        CorruptDataError, UnavailableError: a sample index, or a shard without one, cannot be read.
    """
    wanted = pa.array(keys, pa.string())
    indexes: dict[ObjectInfo, Digest | None] = {}
    for table in tables.values():
        for number, shard in enumerate(table.shards()):
            if shards is None or shard.digest in shards:
                indexes.setdefault(shard, table.index(number))

    def scan(shard: ObjectInfo) -> _Hits | None:
        try:
            stored = _stored_keys(objects, shard, indexes[shard])
        except NotFoundError:
            return None
        found = pc.index_in(stored, value_set=wanted)
        rows = np.flatnonzero(found.is_valid().to_numpy(zero_copy_only=False))
        return _Hits(found.drop_null().to_numpy().astype(np.int64), rows)

    with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="datasvc-keys") as pool:
        hits = dict(zip(indexes, pool.map(scan, indexes), strict=True))
    return {digest: _place(objects, table, hits) for digest, table in tables.items()}


def _stored_keys(objects: Objects, shard: ObjectInfo, index: Digest | None) -> pa.Array:
    if index is not None:
        keys = SampleIndex.decode(objects.read(index), objects.location(index)).table.column(KEY)
    else:
        keys = open_shard(objects, shard).column(KEY)
    joined = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys
    return joined.cast(pa.string())


def _place(objects: Objects, table: ShardTable, hits: Mapping[ObjectInfo, _Hits | None]) -> KeyPlaces:
    deletions = _deletions(objects, table)
    deleted = table.deleted_per_shard
    keys, shards, rows = [], [], []
    num_lost = 0
    for number, shard in enumerate(table.shards()):
        if shard not in hits:
            continue
        found = hits[shard]
        if found is None or (deletions is None and deleted[number] and len(found.keys)):
            num_lost += 1
            continue
        if not len(found.keys):
            continue
        live, places = found.keys, found.rows
        if deleted[number] and deletions is not None:
            kept = deletions.kept_rows(number)
            places = np.searchsorted(kept, found.rows)
            is_live = np.append(kept, -1)[places] == found.rows
            live, places = live[is_live], places[is_live]
        keys.append(live)
        shards.append(np.full(len(live), number))
        rows.append(places)
    return KeyPlaces(_joined(keys), _joined(shards), _joined(rows), num_lost)


def _deletions(objects: Objects, table: ShardTable) -> Deletions | None:
    try:
        return load_deletions(objects, table)
    except NotFoundError:
        return None


def _joined(parts: Iterable[Integers]) -> Integers:
    return np.concatenate([np.empty(0, np.int64), *parts])
