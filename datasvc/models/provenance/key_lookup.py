"""Finds given keys in many splits: the shard and the row of each key. `find_consumers` uses it.

Each sample index is read once, even if several shard tables share its shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from datasvc.errors import NotFoundError
from datasvc.keyed_random import Integers
from datasvc.mix_order import MixOrder, own_order
from datasvc.models.provenance.consumed_ranges import ReadOrder
from datasvc.repository import Digest, ObjectInfo, Objects
from datasvc.shards.format.reader import open_shard
from datasvc.shards.format.sample_index import SampleIndex
from datasvc.shards.format.schema import KEY, LABEL
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.deletions import Deletions, load_deletions, stored_rows_of
from datasvc.shards.versions.labels import labels_at
from datasvc.shards.versions.weights import open_order, open_order_inputs
from datasvc.threads import map_in_threads

_READS_AT_ONCE = 8


@dataclass(frozen=True)
class KeyPlaces:
    """Places of requested keys in one split. A place is a shard and a row.

    Attributes:
        keys: `int64[n]`, index in the requested keys of each key that was found.
        shards: `int64[n]`, number of the key's shard in the shard table.
        rows: `int64[n]`, row of the key in the shard; deleted samples are not counted, as in an access order.
        lost: numbers of the shards that could not be searched, because the repository lacks their keys or the list of
            the deletions of the split.
    """

    keys: Integers
    shards: Integers
    rows: Integers
    lost: frozenset[int] = frozenset()

    @classmethod
    def join(cls, parts: Sequence[KeyPlaces]) -> KeyPlaces:
        """Join the results of several searches of one split."""
        return cls(
            concatenate(part.keys for part in parts),
            concatenate(part.shards for part in parts),
            concatenate(part.rows for part in parts),
            # A union, not a sum: every search in the split misses the same shards.
            frozenset[int]().union(*(part.lost for part in parts)),
        )


class _Hits(NamedTuple):
    """Requested keys that a stored shard contains; keys of deleted samples are included.

    Attributes:
        keys: `int64[n]`, indices in the requested keys.
        rows: `int64[n]`, row of each key in the stored shard, ascending.
    """

    keys: Integers
    rows: Integers


def find_places(
    objects: Objects,
    tables: Mapping[Digest, ShardTable],
    keys: Sequence[str],
    *,
    shards: frozenset[Digest] | None = None,
) -> dict[Digest, KeyPlaces]:
    """Return the places of keys in each of several splits, by digest of the shard table; omit deleted samples.

    Args:
        objects: objects of the repository.
        tables: shard tables of the splits, by digest.
        keys: distinct keys.
        shards: digests of the shards to search; None searches all shards.

    Raises:
        CorruptDataError, UnavailableError: a sample index, or a shard that has no sample index, cannot be read.
    """
    key_array = pa.array(keys, pa.string())
    indexes: dict[ObjectInfo, Digest | None] = {}  # sample index of each distinct shard; None if it has none
    for table in tables.values():
        for number, shard in enumerate(table.shards()):
            if shards is None or shard.digest in shards:
                indexes.setdefault(shard, table.index(number))

    def scan(shard: ObjectInfo) -> _Hits | None:
        try:
            stored = _stored_keys(objects, shard, indexes[shard])
        except NotFoundError:
            return None  # `_places_in` counts the shard as lost
        # For each row, the index of its key in the requested keys; null if the key is not requested.
        numbers = pc.index_in(stored, value_set=key_array)
        rows = np.flatnonzero(numbers.is_valid().to_numpy(zero_copy_only=False))
        return _Hits(numbers.drop_null().to_numpy().astype(np.int64), rows)

    hits = dict(zip(indexes, map_in_threads(scan, indexes, _READS_AT_ONCE), strict=True))
    return {digest: _places_in(objects, table, hits) for digest, table in tables.items()}


def _stored_keys(objects: Objects, shard: ObjectInfo, index: Digest | None) -> pa.Array:
    """Return the keys of a shard in the order of its rows, from its sample index if it has one."""
    # The sample index has the keys without the samples, so it is much smaller than the shard.
    if index is not None:
        keys = SampleIndex.decode(objects.read(index), objects.location(index)).table.column(KEY)
    else:
        keys = open_shard(objects, shard).column(KEY)
    array = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys
    return array.cast(pa.string())


def places_of_rows(objects: Objects, table: ShardTable, rows: Mapping[int, Integers]) -> KeyPlaces:
    """Return the places of samples of one split, by shard: rows of its file; omit deleted samples.

    The keys of the result are all 0. Raises NotFoundError: the deletions of the split are not in the repository.
    """
    deletions, deleted = load_deletions(objects, table), table.deleted_per_shard
    kept = {
        shard: _remaining(deletions, shard, stored)[1] if deletions is not None and deleted[shard] else stored
        for shard, stored in rows.items()
    }
    shards = concatenate(np.full(len(places), shard) for shard, places in kept.items())
    return KeyPlaces(np.zeros_like(shards), shards, concatenate(kept.values()))


def _remaining(deletions: Deletions, shard: int, rows: Integers) -> tuple[npt.NDArray[np.bool_], Integers]:
    """Return which rows of a shard's file are not deleted, `bool[n]`, and their rows without deleted samples."""
    # The index of a stored row in `remaining_rows` is its row without deleted samples. If the row at this
    # index is another one, the sample was deleted. For a deleted row after the last remaining row, the index
    # is that of the appended -1, which equals no stored row.
    remaining_rows = deletions.kept_rows(shard)
    places = np.searchsorted(remaining_rows, rows)
    is_kept = np.append(remaining_rows, -1)[places] == rows
    return is_kept, places[is_kept]


def _places_in(objects: Objects, table: ShardTable, hits: Mapping[ObjectInfo, _Hits | None]) -> KeyPlaces:
    """Return the places of the hits in one split, without those of deleted samples."""
    deletions = _deletions(objects, table)
    deleted = table.deleted_per_shard
    keys, shards, rows = [], [], []
    lost = set[int]()
    for number, shard in enumerate(table.shards()):
        if shard not in hits:
            continue  # `find_places` was not asked to search this shard
        hit = hits[shard]
        # If the deletions are not in the repository, it is unknown which hits were deleted, and which rows the others
        # have: count the shard as lost.
        if hit is None or (deletions is None and deleted[number] and len(hit.keys)):
            lost.add(number)
            continue
        if not len(hit.keys):
            continue
        kept_keys, kept_rows = hit.keys, hit.rows
        if deleted[number] and deletions is not None:
            is_kept, kept_rows = _remaining(deletions, number, hit.rows)
            kept_keys = kept_keys[is_kept]
        keys.append(kept_keys)
        shards.append(np.full(len(kept_keys), number))
        rows.append(kept_rows)
    return KeyPlaces(concatenate(keys), concatenate(shards), concatenate(rows), frozenset(lost))


def without_corrected(objects: Objects, table: ShardTable, places: KeyPlaces, corrected: Sequence[str]) -> KeyPlaces:
    """Return the places of samples with another class than `corrected` has for their key; without labels, none."""
    none = replace(places, keys=places.keys[:0], shards=places.shards[:0], rows=places.rows[:0])
    if LABEL not in table.sample_schema.names or not len(places.keys):
        return none
    try:
        stored = stored_rows_of(objects, table, places.shards, places.rows)
        labels = labels_at(objects, table, places.shards, stored)
    except NotFoundError:
        return replace(none, lost=places.lost | frozenset(places.shards.tolist()))
    learned = [label != corrected[key] for label, key in zip(labels, places.keys.tolist(), strict=True)]
    kept = np.array(learned, np.bool_)
    return replace(places, keys=places.keys[kept], shards=places.shards[kept], rows=places.rows[kept])


def _deletions(objects: Objects, table: ShardTable) -> Deletions | None:
    """Return the deletions of a split; None if they are not in the repository."""
    try:
        return load_deletions(objects, table)
    except NotFoundError:
        return None


def concatenate(parts: Iterable[Integers]) -> Integers:
    """Concatenate arrays; unlike `np.concatenate`, accept an empty sequence of arrays."""
    return np.concatenate([np.empty(0, np.int64), *parts])


# `find_consumers` compares these positions with the ranges that versions consumed.


@dataclass(frozen=True)
class Served:
    """Positions at which samples are served in one epoch.

    Attributes:
        positions: `int64[n]`, positions in the epoch, ascending.
        keys: `int64[n]`, for each position, the index of its sample's key in the list of requested keys.
        sources: `int64[n]`, for each position, the index in `ReadOrder.tables` of the split that serves it.
        places: `int64[n]`, number of each sample in its split: a pack serves several samples at one position.
    """

    positions: Integers
    keys: Integers
    sources: Integers
    places: Integers

    def __getitem__(self, chosen: slice | Integers) -> Served:
        return Served(self.positions[chosen], self.keys[chosen], self.sources[chosen], self.places[chosen])


def mix_order(order: ReadOrder, sizes: Sequence[int]) -> MixOrder:
    """Return the order of a mixture's positions; `sizes` has the number of samples of each of `order.tables`."""
    assert order.mix is not None
    mix = order.mix
    return MixOrder(
        sizes,
        mix.weights,
        epoch_samples=mix.epoch_samples,
        block=mix.block,
        seed=order.config.seed,
        stages=mix.stages,
    )


class KeyPositions:
    """Compute the positions of given samples in the epochs of one read order.

    Args:
        order: read order.
        tables: shard tables by digest; must contain those of the order's splits.
        places: shards and rows of the samples, by index of the split in `order.tables`; a split that has none of the
            samples may be absent.
        objects: objects of the repository, with the weights or packs of tables.

    Attributes:
        keys: `int64[n]`, indices in the list of requested keys: only keys that the order serves. An index is
            repeated if several splits have the key.
        num_samples: number of positions of an epoch.
    """

    def __init__(
        self,
        order: ReadOrder,
        tables: Mapping[Digest, ShardTable],
        places: Mapping[int, KeyPlaces],
        objects: Objects,
    ) -> None:
        self._order = order
        self._tables = [tables[digest] for digest in order.tables]
        self._inputs = [open_order_inputs(objects, table) for table in self._tables]
        self._places = {source: split_places for source, split_places in places.items() if len(split_places.keys)}
        self.keys = concatenate(split_places.keys for split_places in self._places.values())
        sizes = [table.num_positions for table in self._tables]
        self.num_samples = sizes[0]
        self._mixed: MixOrder | None = None  # None for a single split
        if order.mix is not None:
            self.num_samples = order.mix.epoch_samples
            self._mixed = mix_order(order, sizes)

    def find(self, epoch: int) -> Served:
        """Return the positions of the samples in an epoch."""
        parts = [self._find(source, places, epoch) for source, places in self._places.items()]
        served = Served(
            concatenate(part.positions for part in parts),
            concatenate(part.keys for part in parts),
            concatenate(part.sources for part in parts),
            concatenate(part.places for part in parts),
        )
        return served[np.argsort(served.positions, kind="stable")]

    def _find(self, source: int, places: KeyPlaces, epoch: int) -> Served:
        """Return the positions of the samples of one split."""
        if self._mixed is None:
            order = open_order(self._tables[source], self._inputs[source], self._order.config, epoch)
            samples, positions = order.copies_of(places.shards, places.rows)
            numbers = _numbers(self._tables[source], places)[samples]
            return Served(positions, places.keys[samples], np.full(len(positions), source), numbers)
        return self._find_mixed(self._mixed, source, places, epoch)

    def _find_mixed(self, mixed: MixOrder, source: int, places: KeyPlaces, epoch: int) -> Served:
        """Return the positions at which an epoch of a mixture serves the samples of one split."""
        table = self._tables[source]
        # In a mixture, each split has an access order with a seed of its own.
        config = own_order(self._order.config, self._order.tables[source])
        size = table.num_positions
        # An ordinal numbers the samples of this split through all its epochs: from 0 in epoch 0, from `size` in epoch
        # 1. An epoch of the mixture serves the ordinals `start` to `stop` - 1, which need not be whole split epochs.
        # `cursors` returns the split epoch and position with which this and the next epoch of the mixture begin.
        first_epoch, first_position = mixed.cursors(epoch, 0)[source]
        last_epoch, last_position = mixed.cursors(epoch + 1, 0)[source]
        start = first_epoch * size + first_position
        stop = last_epoch * size + last_position
        ordinals, keys, numbers = [], [], []
        all_numbers = _numbers(table, places)
        for split_epoch in mixed.own_epochs(source, epoch):
            order = open_order(table, self._inputs[source], config, split_epoch)
            samples, split_positions = order.copies_of(places.shards, places.rows)
            split_ordinals = split_epoch * size + split_positions
            is_served = (split_ordinals >= start) & (split_ordinals < stop)
            ordinals.append(split_ordinals[is_served])
            keys.append(places.keys[samples[is_served]])
            numbers.append(all_numbers[samples[is_served]])
        # `line_of` returns positions counted through all epochs of the mixture; subtract those of earlier epochs.
        positions = mixed.line_of(source, concatenate(ordinals)) - epoch * self.num_samples
        return Served(positions, concatenate(keys), np.full(len(positions), source), concatenate(numbers))


def _numbers(table: ShardTable, places: KeyPlaces) -> Integers:
    """Return the number of each place among the live samples of its split: `int64[n]`."""
    counts = table.samples_per_shard
    numbers: Integers = (np.cumsum(counts) - counts)[places.shards] + places.rows
    return numbers
