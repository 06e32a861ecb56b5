"""Which versions consumed given samples, in which epoch and step: computed from recorded orders and positions.

No training writes down samples. An order says at which position of an epoch each is served, a version's entry which
positions its weights have behind them, and so do those of all versions that it continues. What a run served after its
last checkpoint is part of no version. A sample that did not decode and was masked counts as consumed: only the run's
ledger knows of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.models.provenance.consumed_ranges import EpochPart, ReadOrder, find_in, parts_of
from datasvc.models.provenance.key_lookup import KeyPlaces, find_places
from datasvc.models.provenance.key_positions import KeyPositions
from datasvc.models.provenance.sample_query import SampleQuery, find_deleted, find_wanted, read_tables
from datasvc.models.provenance.sample_uses import Bits, ConsumerReport, UseBatch, VersionUses
from datasvc.models.provenance.segments import Consumed, plan_segments
from datasvc.models.registry.ancestry import Ancestry, read_ancestry
from datasvc.repository import Digest, Objects, Repository
from datasvc.shards.format.shard_table import ShardTable


def find_consumers(
    repository: Repository,
    refs: Sequence[str] = (),
    *,
    keys: Iterable[str] | None = None,
    deleted_in: str | None = None,
    data: str | None = None,
    split: str | None = None,
) -> ConsumerReport:
    """Return which versions consumed some samples: in their own training, or that of a version that they continue.

    Args:
        repository: with the versions and the data that they read.
        refs: `NAME` for all versions of a model, `NAME@VERSION` or `NAME@TAG` for one; (): all models.
        keys: of the samples. Either this or `deleted_in`.
        deleted_in: a version of a data set: the samples that it deleted, in whatever shares the shards that had them.
        data: count the keys in this data set or version only; with `deleted_in`, in this one too, though it shares no
            shard.
        split: count them in splits of this name only.

    Raises:
        ConfigError: both or none of `keys` and `deleted_in`; a reference is none.
        NotFoundError: there is no such version; or `deleted_in` is the first of its data set.
        CorruptDataError, UnavailableError: an entry, a shard table or a sample index cannot be read.
    """
    if (keys is None) == (deleted_in is None):
        raise ConfigError("say which samples: by keys, or by the version of a data set that deleted them, not both")
    if isinstance(keys, str):
        raise ConfigError(f"keys is the text {keys!r}; expected several keys, such as [{keys!r}]")
    if deleted_in is not None:
        wanted = find_deleted(repository, deleted_in, data=data, split=split)
    else:
        wanted = [find_wanted(repository, keys or (), data=data, split=split)]
    ancestry = read_ancestry(repository, refs)
    return _Searching(repository.objects, ancestry, wanted).run()


class _Search(NamedTuple):
    """Wanted samples, by their number, and a split that may have some: in any of its shards, or in shared ones."""

    number: int
    table: Digest
    in_all: bool


class _Searching:
    def __init__(self, objects: Objects, ancestry: Ancestry, wanted: Sequence[SampleQuery]) -> None:
        self._objects = objects
        self._ancestry = ancestry
        self._wanted = wanted
        self._keys = [key for each in wanted for key in each.keys]
        self._planned = plan_segments(ancestry)
        self._gaps = {name: list(own.gaps) for name, own in self._planned.items()}
        self._tables: dict[Digest, ShardTable | None] = {}
        self._readers: dict[ReadOrder, dict[str, None]] = {}

    def run(self) -> ConsumerReport:
        readers = self._open_readers()
        chunks = self._find(readers)
        own = {name: np.zeros(-(-len(self._keys) // 8), np.uint8) for name in self._planned}
        for name, chunk in chunks:
            own[name] |= _bits(chunk.served.keys, len(self._keys))
        seen = self._inherit(own)
        known = np.zeros(len(self._keys), np.bool_)
        for reader in readers.values():
            known[reader.keys] = True
        return ConsumerReport(
            keys=self._keys,
            missing=np.flatnonzero(~known),
            versions=self._versions(seen, own),
            gaps={name: tuple(dict.fromkeys(gaps)) for name, gaps in self._gaps.items() if gaps},
            chunks=[chunk for _, chunk in chunks],
            seen=seen,
        )

    def _find(self, readers: Mapping[ReadOrder, KeyPositions]) -> list[tuple[str, UseBatch]]:
        """Return what each version consumed itself, in the order of versions and of training."""
        # By order and epoch: each is computed once, however many versions lie in it.
        by_epoch: dict[tuple[ReadOrder, int], list[tuple[int, str, Consumed, EpochPart]]] = {}
        number = 0
        for name, own in self._planned.items():
            for consumed in own.consumed:
                order = consumed.segment.order
                for part in self._parts(name, consumed, readers[order]) if order in readers else []:
                    by_epoch.setdefault((order, part.epoch), []).append((number, name, consumed, part))
                    number += 1
        found: list[tuple[int, str, UseBatch]] = []
        for (order, epoch), parts in by_epoch.items():
            served = readers[order].find(epoch)
            for number, name, consumed, part in parts:
                within = served[find_in(part, served.positions)]
                if len(within.keys):
                    found.append((number, name, UseBatch(consumed, part, within)))
        return [(name, chunk) for _, name, chunk in sorted(found, key=lambda each: each[0])]

    def _open_readers(self) -> dict[ReadOrder, KeyPositions]:
        """Return what finds the samples in each order that may hold some; of orders that cannot be read a gap."""
        named: dict[ReadOrder, list[set[str]]] = {}
        for version, own in self._planned.items():
            for order in (each.segment.order for each in own.consumed):
                names = named.setdefault(order, [set() for _ in order.tables])
                for known, name in zip(names, order.names, strict=True):
                    known.add(name)
                self._readers.setdefault(order, {})[version] = None
        relevant = [order for order, names in named.items() if self._may_hold(order, names)]
        self._tables = read_tables(self._objects, {digest for order in relevant for digest in order.tables})
        searches = {order: self._searches(order, named[order]) for order in relevant}
        usable = [order for order in relevant if any(searches[order]) and self._is_whole(order)]
        places = self._find_places({search for order in usable for each in searches[order] for search in each})
        tables = {digest: table for digest, table in self._tables.items() if table is not None}
        readers = {}
        for order in usable:
            by_source = {
                source: KeyPlaces.join([places[search] for search in each])
                for source, each in enumerate(searches[order])
            }
            for source, found in by_source.items():
                if found.num_lost:
                    self._say(order, f"of {order.names[source]}, which it read, {found.num_lost} shards are not here")
            readers[order] = KeyPositions(order, tables, by_source)
        return readers

    def _may_hold(self, order: ReadOrder, names: Sequence[set[str]]) -> bool:
        return any(
            wanted.deletion is not None or any(map(wanted.counts_in, names, order.tables)) for wanted in self._wanted
        )

    def _searches(self, order: ReadOrder, names: Sequence[set[str]]) -> list[list[_Search]]:
        """Return where to look in each split of an order; says which of them nobody can tell."""
        found: list[list[_Search]] = [[] for _ in order.tables]
        for number, wanted in enumerate(self._wanted):
            for own, known, digest, name in zip(found, names, order.tables, order.names, strict=True):
                table, deletion = self._tables[digest], wanted.deletion
                if wanted.counts_in(known, digest):
                    own.append(_Search(number, digest, in_all=True))
                elif deletion is None:
                    continue
                elif table is not None and any(shard.digest in deletion.shards for shard in table.shards()):
                    own.append(_Search(number, digest, in_all=False))
                elif wanted.may_be_older(known) and table is None:
                    self._say_missing(order, digest, name)
                elif wanted.may_be_older(known) and digest not in deletion.known:
                    self._say(
                        order,
                        f"it read {name} of shard table {digest[:12]}..., which is of no version of {deletion.name} "
                        f"here: whether it has what {deletion.version} deleted is not known",
                    )
        return found

    def _find_places(self, searches: Iterable[_Search]) -> dict[_Search, KeyPlaces]:
        """Return where the samples lie, keys numbered over all that are wanted."""
        wanted_in: dict[tuple[int, bool], dict[Digest, ShardTable]] = {}
        for search in searches:
            table = self._tables[search.table]
            assert table is not None
            wanted_in.setdefault((search.number, search.in_all), {})[search.table] = table
        firsts = np.cumsum([0, *(len(wanted.keys) for wanted in self._wanted)]).tolist()
        found: dict[_Search, KeyPlaces] = {}
        for (number, in_all), tables in wanted_in.items():
            wanted = self._wanted[number]
            shards = None if in_all or wanted.deletion is None else wanted.deletion.shards
            for digest, places in find_places(self._objects, tables, wanted.keys, shards=shards).items():
                found[_Search(number, digest, in_all)] = replace(places, keys=places.keys + firsts[number])
        return found

    def _is_whole(self, order: ReadOrder) -> bool:
        """Return whether all shard tables of an order are here; says for whom they are not."""
        missing = [each for each in zip(order.tables, order.names, strict=True) if self._tables[each[0]] is None]
        for digest, name in missing:
            self._say_missing(order, digest, name)
        return not missing

    def _say_missing(self, order: ReadOrder, digest: Digest, name: str) -> None:
        self._say(order, f"it read {name} of shard table {digest[:12]}..., which this repository does not have")

    def _say(self, order: ReadOrder, gap: str) -> None:
        for version in self._readers[order]:
            self._gaps[version].append(gap)

    def _parts(self, name: str, consumed: Consumed, reader: KeyPositions) -> list[EpochPart]:
        try:
            parts = list(parts_of(consumed.segment, reader.num_samples))
        except ConfigError as error:
            self._gaps[name].append(f"what it says of {consumed.use.dataset} cannot be: {error}")
            return []
        if not all(part.is_certain for part in parts):
            self._gaps[name].append(
                "it does not say how long its batches were: samples at the end of an epoch may have been dropped"
            )
        return parts

    def _inherit(self, own: Mapping[str, Bits]) -> dict[str, Bits]:
        """Return which samples each version has behind it; parents come before children."""
        seen: dict[str, Bits] = {}
        for name, version in self._ancestry.versions.items():
            seen[name] = own[name].copy()
            for parent in version.parents:
                seen[name] |= seen[parent]
        return seen

    def _versions(self, seen: Mapping[str, Bits], own: Mapping[str, Bits]) -> list[VersionUses]:
        complete: dict[str, bool] = {}
        for name, version in self._ancestry.versions.items():
            complete[name] = not self._gaps[name] and all(complete[parent] for parent in version.parents)
        return [
            VersionUses(name, _count(seen[name]), _count(own[name]), complete[name]) for name in self._ancestry.asked
        ]


def _bits(numbers: Integers, size: int) -> Bits:
    flags = np.zeros(size, np.bool_)
    flags[numbers] = True
    return np.packbits(flags, bitorder="little")


def _count(bits: Bits) -> int:
    return int(np.bitwise_count(bits).sum())
