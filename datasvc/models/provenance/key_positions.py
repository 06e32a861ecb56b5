"""At which positions of an epoch given samples are served: of a split, or of a mixture of several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from datasvc.keyed_random import Integers
from datasvc.mix_order import MixOrder, own_order
from datasvc.models.provenance.consumed_ranges import Mix, ReadOrder
from datasvc.models.provenance.key_lookup import KeyPlaces
from datasvc.order import AccessOrder
from datasvc.repository import Digest
from datasvc.shards.format.shard_table import ShardTable


@dataclass(frozen=True)
class Served:
    """When samples are served in one epoch, by position.

    Attributes:
        positions: `int64[n]`, ascending.
        keys: `int64[n]`, numbers of the keys.
        sources: `int64[n]`, numbers of their splits in the order.
    """

    positions: Integers
    keys: Integers
    sources: Integers

    def __getitem__(self, chosen: slice | Integers) -> Served:
        return Served(self.positions[chosen], self.keys[chosen], self.sources[chosen])


class KeyPositions:
    """Says when samples are served.

    Args:
        order: in which they are read.
        tables: shard tables, by digest: those of the order's splits at least.
        places: of the samples, by source; sources without any may be missing.

    Attributes:
        keys: `int64[n]`, numbers of the keys that are in the order at all, some more than once.
        num_samples: of an epoch.
    """

    def __init__(
        self, order: ReadOrder, tables: Mapping[Digest, ShardTable], places: Mapping[int, KeyPlaces]
    ) -> None:
        self._order = order
        self._counts = [tables[digest].samples_per_shard for digest in order.tables]
        self._places = {source: found for source, found in places.items() if len(found.keys)}
        self.keys = _joined(each.keys for each in self._places.values())
        sizes = [int(counts.sum()) for counts in self._counts]
        self.num_samples = sizes[0] if order.mix is None else order.mix.epoch_samples
        self._mixed = None if order.mix is None else _mix_order(order.mix, sizes, order.config.seed)

    def find(self, epoch: int) -> Served:
        """Return when the samples are served in an epoch."""
        found = [self._find(source, places, epoch) for source, places in self._places.items()]
        served = Served(
            _joined(each.positions for each in found),
            _joined(each.keys for each in found),
            _joined(each.sources for each in found),
        )
        return served[np.argsort(served.positions, kind="stable")]

    def _find(self, source: int, places: KeyPlaces, epoch: int) -> Served:
        if self._mixed is None:
            order = AccessOrder(self._counts[source], self._order.config, epoch)
            positions = order.positions_of(places.shards, places.rows)
            return Served(positions, places.keys, np.full(len(positions), source))
        return self._find_mixed(self._mixed, source, places, epoch)

    def _find_mixed(self, mixed: MixOrder, source: int, places: KeyPlaces, epoch: int) -> Served:
        counts = self._counts[source]
        config = own_order(self._order.config, self._order.tables[source])
        size = int(counts.sum())
        begin, end = (
            own_epoch * size + position
            for own_epoch, position in (mixed.cursors(each, 0)[source] for each in (epoch, epoch + 1))
        )
        ordinals, keys = [], []
        for own in mixed.own_epochs(source, epoch):
            found = own * size + AccessOrder(counts, config, own).positions_of(places.shards, places.rows)
            inside = (found >= begin) & (found < end)
            ordinals.append(found[inside])
            keys.append(places.keys[inside])
        line = mixed.line_of(source, _joined(ordinals))
        return Served(line - epoch * self.num_samples, _joined(keys), np.full(len(line), source))


def _joined(parts: Iterable[Integers]) -> Integers:
    return np.concatenate([np.empty(0, np.int64), *parts])


def _mix_order(mix: Mix, sizes: Sequence[int], seed: int) -> MixOrder:
    return MixOrder(sizes, mix.weights, epoch_samples=mix.epoch_samples, block=mix.block, seed=seed)
