"""Finds the versions that consumed given samples, with epoch and step, from recorded read orders and positions.

Training does not record samples. The read order (the splits and their access order) determines the position of each
sample in an epoch. The entry of a version records the positions that its training has consumed. A version has
also consumed the samples of the versions that it continues. Samples that a run served after its last checkpoint
belong to no version. A sample that the run masked on request does not count. One that could not be decoded counts as
consumed, because only a ledger records it.

A search has four stages: plan the segments of all versions (`segments`); find the keys in the shards (`key_lookup`);
compute the positions of the samples in each epoch (`key_lookup`); compare these positions with the segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.models.provenance.consumed_ranges import EpochPart, ReadOrder, find_in, parts_of
from datasvc.models.provenance.key_lookup import KeyPlaces, KeyPositions, find_places, without_corrected
from datasvc.models.provenance.masked_uses import MaskedUses
from datasvc.models.provenance.sample_query import SampleQuery, query_deleted, query_keys, read_tables, version_table
from datasvc.models.provenance.sample_uses import Bits, ConsumerReport, UseBatch, VersionUses
from datasvc.models.provenance.segments import Consumed, plan_segments
from datasvc.models.registry.ancestry import Ancestry, read_ancestry
from datasvc.printable import count_text
from datasvc.repository import Digest, Objects, Repository
from datasvc.repository.logs.references import refuse_text
from datasvc.shards.format.shard_table import ShardTable


def find_consumers(
    repository: Repository,
    refs: Sequence[str] = (),
    *,
    keys: Iterable[str] | None = None,
    deleted_in: str | None = None,
    changed_in: str | None = None,
    data: str | None = None,
    split: str | None = None,
) -> ConsumerReport:
    """Find the versions that consumed given samples in their own training, or in that of a version they continue.

    Args:
        repository: repository of the versions and of the data sets that they read.
        refs: `NAME` for all versions of a model, `NAME@VERSION` or `NAME@TAG` for one; () for all models.
        keys: keys of the samples. Give either this, `deleted_in` or `changed_in`.
        deleted_in: a data-set version. Search for the samples that it deleted, in every data set that uses a shard
            which contained them.
        changed_in: a data-set version. Search for the samples that it gave another label, where they have an older
            one: the versions that learned a label which was corrected since.
        data: a data set, or a version of one. With `keys`, search only in it. With `deleted_in` or `changed_in`,
            search in it too, even if it uses none of these shards.
        split: match the keys only in splits of this name.

    Raises:
        ConfigError: not one of `keys`, `deleted_in` and `changed_in` is given, or a reference is not valid.
        NotFoundError: a version does not exist, or `deleted_in` or `changed_in` is the first of its data set.
        CorruptDataError, UnavailableError: an entry, a shard table or a sample index cannot be read.
    """
    if sum(each is not None for each in (keys, deleted_in, changed_in)) != 1:
        raise ConfigError(
            "give the samples either by keys or by the data-set version that deleted or corrected them, not both"
        )
    refuse_text(keys, "keys", "keys")
    refuse_text(refs, "refs")
    change = deleted_in or changed_in
    if change is not None:
        is_label = changed_in is not None
        queries = query_deleted(repository, change, data=data, split=split, relabelled=is_label)
    else:
        queries = [query_keys(repository, keys or (), data=data, split=split)]
    ancestry = read_ancestry(repository, refs)
    return _ConsumerSearch(repository.objects, ancestry, queries).run()


class _Lookup(NamedTuple):
    """Search for the keys of one query in the shards of a shard table."""

    number: int  # number of the query
    table: Digest
    in_all: bool  # whether to search all shards, or only those of the query's deletion


class _ConsumerSearch:
    """One search, with its state. A gap is a line of text about a part of a version's consumption that is unknown.

    A key has one number over all queries: its index in `_keys`.
    """

    def __init__(self, objects: Objects, ancestry: Ancestry, queries: Sequence[SampleQuery]) -> None:
        self._objects = objects
        self._ancestry = ancestry
        self._queries = queries
        self._keys = [key for query in queries for key in query.keys]
        self._planned = plan_segments(ancestry)
        self._gaps = {name: list(planned.gaps) for name, planned in self._planned.items()}
        # Shard tables by digest; None if a table is not in this repository.
        self._tables: dict[Digest, ShardTable | None] = {}
        # Versions that read in each order; the inner dict is an ordered set.
        self._versions_of: dict[ReadOrder, dict[str, None]] = {}

    def run(self) -> ConsumerReport:
        by_order = self._positions_by_order()
        batches = self._find_uses(by_order)
        # For each version, the keys that its own training consumed: one bit per key, in whole bytes (rounded up).
        own = {name: np.zeros(-(-len(self._keys) // 8), np.uint8) for name in self._planned}
        for name, batch in batches:
            own[name] |= _bits(batch.served.keys, len(self._keys))
        seen = self._inherit(own)
        is_present = np.zeros(len(self._keys), np.bool_)
        for positions in by_order.values():
            is_present[positions.keys] = True
        return ConsumerReport(
            keys=self._keys,
            missing=np.flatnonzero(~is_present),
            versions=self._count_uses(seen, own),
            gaps={name: tuple(dict.fromkeys(gaps)) for name, gaps in self._gaps.items() if gaps},
            chunks=[batch for _, batch in batches],
            seen=seen,
        )

    def _find_uses(self, by_order: Mapping[ReadOrder, KeyPositions]) -> list[tuple[str, UseBatch]]:
        """Return each version with what its own training consumed, by version, and then in training order."""
        # Group the parts by order and epoch, so that the positions of an epoch are computed once, even if many
        # versions consumed a part of it. The number of each part restores the order of versions and training.
        by_epoch: dict[tuple[ReadOrder, int], list[tuple[int, str, Consumed, EpochPart]]] = {}
        number = 0
        for name, planned in self._planned.items():
            for consumed in planned.consumed:
                order = consumed.segment.order
                if order not in by_order:
                    continue  # none of the samples can be found in this order
                for part in self._parts(name, consumed, by_order[order]):
                    by_epoch.setdefault((order, part.epoch), []).append((number, name, consumed, part))
                    number += 1
        numbered: list[tuple[int, str, UseBatch]] = []
        masked = MaskedUses(self._objects, self._tables)
        for (order, epoch), parts in by_epoch.items():
            in_epoch = by_order[order].find(epoch)
            for number, name, consumed, part in parts:
                in_part = masked.drop(consumed, epoch, in_epoch[find_in(part, in_epoch.positions)])
                if len(in_part.keys):
                    numbered.append((number, name, UseBatch(consumed, part, in_part)))
        return [(name, batch) for _, name, batch in sorted(numbered, key=lambda item: item[0])]

    def _positions_by_order(self) -> dict[ReadOrder, KeyPositions]:
        """Return key positions for each order that may contain the samples; add a gap for data that is missing."""
        # Equal orders may name a split differently, so collect its names. A query applies if one of them matches.
        names_of: dict[ReadOrder, list[set[str]]] = {}
        for version, planned in self._planned.items():
            for order in (consumed.segment.order for consumed in planned.consumed):
                names_of_splits = names_of.setdefault(order, [set() for _ in order.tables])
                for names_of_split, name in zip(names_of_splits, order.names, strict=True):
                    names_of_split.add(name)
                self._versions_of.setdefault(order, {})[version] = None
        if any(query.tables is not None for query in self._queries):
            # Any table may be that of a view of a version that is asked for: only the table names the version's.
            self._tables = read_tables(self._objects, {digest for order in names_of for digest in order.tables})
        relevant = [order for order, names in names_of.items() if self._may_have_samples(order, names)]
        unread = {digest for order in relevant for digest in order.tables} - self._tables.keys()
        self._tables |= read_tables(self._objects, unread)
        lookups = {order: self._plan_lookups(order, names_of[order]) for order in relevant}
        # Search an order only if it has lookups, and all shard tables: positions depend on all of its tables.
        usable = [order for order in relevant if any(lookups[order]) and self._has_all_tables(order)]
        places = self._find_places({lookup for order in usable for split in lookups[order] for lookup in split})
        tables = {digest: table for digest, table in self._tables.items() if table is not None}
        by_order = {}
        for order in usable:
            places_by_split = {
                split_number: KeyPlaces.join([places[lookup] for lookup in split_lookups])
                for split_number, split_lookups in enumerate(lookups[order])
            }
            for split_number, split_places in places_by_split.items():
                if split_places.lost:
                    name = order.names[split_number]
                    gap = (
                        f"it read {name}, of which "
                        f"{count_text(len(split_places.lost), 'shard is', 'shards are')} not in this repository"
                    )
                    self._add_gap(order, gap)
            by_order[order] = KeyPositions(order, tables, places_by_split, self._objects)
        return by_order

    def _may_have_samples(self, order: ReadOrder, names: Sequence[set[str]]) -> bool:
        # The shard tables may not be read yet, so assume that every order has shards with deleted samples.
        tables = [self._version_table(digest) for digest in order.tables]
        return any(
            query.deletion is not None or any(map(query.matches_whole_split, names, tables))
            for query in self._queries
        )

    def _version_table(self, digest: Digest) -> Digest:
        return version_table(digest, self._tables.get(digest))

    def _plan_lookups(self, order: ReadOrder, names_of_splits: Sequence[set[str]]) -> list[list[_Lookup]]:
        """Return the lookups for each split of an order; add a gap if it is unknown whether a split has samples."""
        lookups: list[list[_Lookup]] = [[] for _ in order.tables]
        for number, query in enumerate(self._queries):
            splits = zip(lookups, names_of_splits, order.tables, order.names, strict=True)
            # `names` are all names under which versions read the split, `name` is one of them, for messages.
            for split_lookups, names, digest, name in splits:
                table, deletion = self._tables[digest], query.deletion
                if query.matches_whole_split(names, self._version_table(digest)):
                    split_lookups.append(_Lookup(number, digest, in_all=True))
                elif deletion is None:
                    continue
                elif table is not None and any(shard.digest in deletion.shards for shard in table.shards()):
                    split_lookups.append(_Lookup(number, digest, in_all=False))
                elif query.is_of_deletion_dataset(names) and table is None:
                    self._add_missing_table(order, digest, name)
                elif query.is_of_deletion_dataset(names) and self._version_table(digest) not in deletion.tables:
                    # `deletion.shards` has only shards of versions in this repository. This table is of a version
                    # that is not here, so other shards of the table may have the samples.
                    self._add_gap(
                        order,
                        f"it read {name} of shard table {digest[:12]}..., which belongs to no version of "
                        f"{deletion.name} in this repository: whether it contains the samples that "
                        f"{deletion.version} deleted is unknown",
                    )
        return lookups

    def _find_places(self, lookups: Iterable[_Lookup]) -> dict[_Lookup, KeyPlaces]:
        """Return the shards and rows of the samples of each lookup; keys are numbered over all queries."""
        tables_of: dict[tuple[int, bool], dict[Digest, ShardTable]] = {}
        for lookup in lookups:
            table = self._tables[lookup.table]
            assert table is not None
            tables_of.setdefault((lookup.number, lookup.in_all), {})[lookup.table] = table
        first_key_numbers = np.cumsum([0, *(len(query.keys) for query in self._queries)]).tolist()
        # Search all splits of a query together, so that a sample index that they share is read once.
        places: dict[_Lookup, KeyPlaces] = {}
        for (number, in_all), tables in tables_of.items():
            query = self._queries[number]
            shards = None if in_all or query.deletion is None else query.deletion.shards
            for digest, places_of_keys in find_places(self._objects, tables, query.keys, shards=shards).items():
                found = places_of_keys
                if query.corrected:
                    found = without_corrected(self._objects, tables[digest], found, query.corrected)
                # `find_places` returns indices in `query.keys`; convert them to indices in `_keys`.
                renumbered = replace(found, keys=found.keys + first_key_numbers[number])
                places[_Lookup(number, digest, in_all)] = renumbered
        return places

    def _has_all_tables(self, order: ReadOrder) -> bool:
        """Return whether all shard tables of an order are in the repository; add a gap for each missing one."""
        missing = [split for split in zip(order.tables, order.names, strict=True) if self._tables[split[0]] is None]
        for digest, name in missing:
            self._add_missing_table(order, digest, name)
        return not missing

    def _add_missing_table(self, order: ReadOrder, digest: Digest, name: str) -> None:
        self._add_gap(order, f"it read {name} of shard table {digest[:12]}..., which is not in this repository")

    def _add_gap(self, order: ReadOrder, gap: str) -> None:
        """Add a gap to each version that read in an order."""
        for version in self._versions_of[order]:
            self._gaps[version].append(gap)

    def _parts(self, name: str, consumed: Consumed, positions: KeyPositions) -> list[EpochPart]:
        """Return the parts of a segment by epoch; add a gap if the entry's record is invalid or incomplete."""
        try:
            parts = list(parts_of(consumed.segment, positions.num_samples))
        except ConfigError as error:
            self._gaps[name].append(f"its record of reading {consumed.use.dataset} is not valid: {error}")
            return []
        if not all(part.is_certain for part in parts):
            self._gaps[name].append(
                "it does not record its batch size: samples at the end of an epoch may have been dropped"
            )
        return parts

    def _inherit(self, own: Mapping[str, Bits]) -> dict[str, Bits]:
        """Return, for each version, the keys that it or one of its ancestors consumed, as in `own`."""
        seen: dict[str, Bits] = {}
        for name, version in self._ancestry.versions.items():  # parents come before children
            seen[name] = own[name].copy()
            for parent in version.parents:
                seen[name] |= seen[parent]
        return seen

    def _count_uses(self, seen: Mapping[str, Bits], own: Mapping[str, Bits]) -> list[VersionUses]:
        """Return the number of consumed samples of each requested version."""
        complete: dict[str, bool] = {}
        for name, version in self._ancestry.versions.items():
            # A gap of an ancestor makes its descendants incomplete as well.
            complete[name] = not self._gaps[name] and all(complete[parent] for parent in version.parents)
        requested = self._ancestry.requested
        return [VersionUses(name, _count(seen[name]), _count(own[name]), complete[name]) for name in requested]


def _bits(numbers: Integers, size: int) -> Bits:
    """Return the set of keys with these numbers, of `size` keys in total."""
    flags = np.zeros(size, np.bool_)
    flags[numbers] = True
    # One bit per key instead of one byte, because each version has two such sets.
    return np.packbits(flags, bitorder="little")


def _count(bits: Bits) -> int:
    return int(np.bitwise_count(bits).sum())
