"""Which versions consumed given samples, in which epoch and step: computed from recorded orders and positions.

No training writes down samples. An order says at which position of an epoch each is served, a version's entry which
positions its weights have behind them, and so do those of all versions that it continues. What a run served after its
last checkpoint is part of no version. A sample that did not decode and was masked counts as consumed: only the run's
ledger knows of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from datasvc.errors import ConfigError, NotFoundError
from datasvc.keyed import Integers
from datasvc.models.ancestry import Ancestry, read_ancestry
from datasvc.models.consumption import Part, ReadOrder, find_in, parts_of
from datasvc.models.key_positions import KeyPositions
from datasvc.models.sample_places import KeyPlaces, find_places
from datasvc.models.segments import Consumed, plan_segments
from datasvc.models.sightings import Bits, Chunk, Saw, VersionSaw
from datasvc.repository import Digest, Objects, Repository
from datasvc.shards.diff import diff
from datasvc.shards.table import ShardTable


@dataclass(frozen=True)
class Wanted:
    """Samples that are asked for: keys, and where they count.

    Attributes:
        keys: each once.
        data: only in this data set, "imagenet", or in this version of it, "imagenet@3"; None: in all.
        before: only in versions of it below this number.
        split: only in splits of this name; None: in all.
    """

    keys: tuple[str, ...]
    data: str | None = None
    before: int | None = None
    split: str | None = None

    def is_in(self, name: str) -> bool:
        """Return whether these samples may be in a split, given as "imagenet@3/train"."""
        version, _, split = name.rpartition("/")
        data, _, number = version.partition("@")
        if self.split not in {None, split} or self.data not in {None, data, version}:
            return False
        return self.before is None or not number.isdecimal() or int(number) < self.before


def saw(
    repository: Repository,
    refs: Sequence[str] = (),
    *,
    keys: Iterable[str] | None = None,
    deleted_in: str | None = None,
    data: str | None = None,
    split: str | None = None,
) -> Saw:
    """Return which versions consumed some samples: in their own training, or that of a version that they continue.

    Args:
        repository: with the versions and the data that they read.
        refs: `NAME` for all versions of a model, `NAME@VERSION` or `NAME@TAG` for one; (): all models.
        keys: of the samples. Either this or `deleted_in`.
        deleted_in: a version of a data set: the samples that it deleted.
        data: count the keys in this data set or version only.
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
        wanted = find_deleted(repository, deleted_in, split)
    else:
        wanted = [Wanted(tuple(dict.fromkeys(keys or ())), data, None, split)]
    ancestry = read_ancestry(repository, refs)
    return _Search(repository.objects, ancestry, wanted).run()


def find_deleted(repository: Repository, ref: str, split: str | None = None) -> list[Wanted]:
    """Return the samples that a version of a data set deleted, split by split.

    Raises:
        NotFoundError: there is no such version, or none before it.
        ConfigError, CorruptDataError, UnavailableError: see `shards.diff`.
    """
    version = repository.resolve("datasets", ref)
    parent = repository.entry(version).content.get("parent")
    if parent is None and version.version == 1:
        raise NotFoundError(f"{version} is the first version of {version.name}: it deleted nothing")
    parent = parent or f"{version.name}@{version.version - 1}"
    splits = diff(repository, parent, str(version)).splits
    return [
        Wanted(tuple(each.deleted), version.name, version.version, name)
        for name, each in splits.items()
        if split in {None, name} and len(each.deleted)
    ]


class _Search:
    def __init__(self, objects: Objects, ancestry: Ancestry, wanted: Sequence[Wanted]) -> None:
        self._objects = objects
        self._ancestry = ancestry
        self._wanted = wanted
        self._keys = [key for each in wanted for key in each.keys]
        self._planned = plan_segments(ancestry)
        self._gaps = {name: list(own.gaps) for name, own in self._planned.items()}
        self._tables: dict[Digest, ShardTable | None] = {}

    def run(self) -> Saw:
        readers = self._open_readers()
        chunks = self._find(readers)
        own = {name: np.zeros(-(-len(self._keys) // 8), np.uint8) for name in self._planned}
        for name, chunk in chunks:
            own[name] |= _bits(chunk.served.keys, len(self._keys))
        seen = self._inherit(own)
        known = np.zeros(len(self._keys), np.bool_)
        for reader in readers.values():
            known[reader.keys] = True
        return Saw(
            keys=self._keys,
            missing=np.flatnonzero(~known),
            versions=self._versions(seen, own),
            gaps={name: tuple(dict.fromkeys(gaps)) for name, gaps in self._gaps.items() if gaps},
            chunks=[chunk for _, chunk in chunks],
            seen=seen,
        )

    def _find(self, readers: Mapping[ReadOrder, KeyPositions]) -> list[tuple[str, Chunk]]:
        """Return what each version consumed itself, in the order of versions and of training."""
        # By order and epoch: each is computed once, however many versions lie in it.
        by_epoch: dict[tuple[ReadOrder, int], list[tuple[int, str, Consumed, Part]]] = {}
        number = 0
        for name, own in self._planned.items():
            for consumed in own.consumed:
                order = consumed.segment.order
                for part in self._parts(name, consumed, readers[order]) if order in readers else []:
                    by_epoch.setdefault((order, part.epoch), []).append((number, name, consumed, part))
                    number += 1
        found: list[tuple[int, str, Chunk]] = []
        for (order, epoch), parts in by_epoch.items():
            served = readers[order].find(epoch)
            for number, name, consumed, part in parts:
                within = served[find_in(part, served.positions)]
                if len(within.keys):
                    found.append((number, name, Chunk(consumed, part, within)))
        return [(name, chunk) for _, name, chunk in sorted(found, key=lambda each: each[0])]

    def _open_readers(self) -> dict[ReadOrder, KeyPositions]:
        """Return what finds the samples in each order that may hold some; of orders that cannot be read a gap."""
        named: dict[ReadOrder, list[set[str]]] = {}
        for consumed in (each for own in self._planned.values() for each in own.consumed):
            order = consumed.segment.order
            names = named.setdefault(order, [set() for _ in order.tables])
            for known, name in zip(names, order.names, strict=True):
                known.add(name)
        groups = {order: [self._group(names) for names in each] for order, each in named.items()}
        relevant = [order for order, each in groups.items() if any(group is not None for group in each)]
        usable = [order for order in relevant if self._read_tables(order)]
        places = self._find_places(usable, groups)
        tables = {digest: table for digest, table in self._tables.items() if table is not None}
        return {
            order: KeyPositions(
                order,
                tables,
                {
                    source: places[group, digest]
                    for source, (group, digest) in enumerate(zip(groups[order], order.tables, strict=True))
                    if group is not None
                },
            )
            for order in usable
        }

    def _group(self, names: Iterable[str]) -> int | None:
        """Return the number of the wanted samples that may be in a split, by the names that versions give it."""
        return next((number for number, each in enumerate(self._wanted) if any(map(each.is_in, names))), None)

    def _find_places(
        self, orders: Sequence[ReadOrder], groups: Mapping[ReadOrder, Sequence[int | None]]
    ) -> dict[tuple[int, Digest], KeyPlaces]:
        found: dict[tuple[int, Digest], KeyPlaces] = {}
        first = 0
        for number, wanted in enumerate(self._wanted):
            used = {
                digest: self._tables[digest]
                for order in orders
                for group, digest in zip(groups[order], order.tables, strict=True)
                if group == number
            }
            tables = {digest: table for digest, table in used.items() if table is not None}
            for digest, places in find_places(self._objects, tables, wanted.keys).items():
                found[number, digest] = KeyPlaces(places.keys + first, places.shards, places.rows)
            first += len(wanted.keys)
        return found

    def _read_tables(self, order: ReadOrder) -> bool:
        """Read the shard tables of an order; returns whether all are here, and says for whom they are not."""
        for digest, name in zip(order.tables, order.names, strict=True):
            if digest not in self._tables:
                self._tables[digest] = self._read_table(digest)
            if self._tables[digest] is None:
                for version, own in self._planned.items():
                    if any(each.segment.order == order for each in own.consumed):
                        self._gaps[version].append(
                            f"it read {name} of shard table {digest[:12]}..., which this repository does not have"
                        )
                return False
        return True

    def _read_table(self, digest: Digest) -> ShardTable | None:
        try:
            return ShardTable.decode(self._objects.read(digest), self._objects.location(digest))
        except NotFoundError:
            return None

    def _parts(self, name: str, consumed: Consumed, reader: KeyPositions) -> list[Part]:
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

    def _versions(self, seen: Mapping[str, Bits], own: Mapping[str, Bits]) -> list[VersionSaw]:
        complete: dict[str, bool] = {}
        for name, version in self._ancestry.versions.items():
            complete[name] = not self._gaps[name] and all(complete[parent] for parent in version.parents)
        return [
            VersionSaw(name, _count(seen[name]), _count(own[name]), complete[name]) for name in self._ancestry.asked
        ]


def _bits(numbers: Integers, size: int) -> Bits:
    flags = np.zeros(size, np.bool_)
    flags[numbers] = True
    return np.packbits(flags, bitorder="little")


def _count(bits: Bits) -> int:
    return int(np.bitwise_count(bits).sum())
