"""Computes the positions at which an epoch serves given samples, for a single split or a mixture.

`find_consumers` compares these positions with the ranges that versions consumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from datasvc.keyed_random import Integers
from datasvc.mix_order import MixOrder, own_order
from datasvc.models.provenance.consumed_ranges import ReadOrder
from datasvc.models.provenance.key_lookup import KeyPlaces, concatenate
from datasvc.order import AccessOrder
from datasvc.repository import Digest
from datasvc.shards.format.shard_table import ShardTable


@dataclass(frozen=True)
class Served:
    """Positions at which samples are served in one epoch.

    Attributes:
        positions: `int64[n]`, positions in the epoch, ascending.
        keys: `int64[n]`, for each position, the index of its sample's key in the list of requested keys.
        sources: `int64[n]`, for each position, the index in `ReadOrder.tables` of the split that serves it.
    """

    positions: Integers
    keys: Integers
    sources: Integers

    def __getitem__(self, chosen: slice | Integers) -> Served:
        return Served(self.positions[chosen], self.keys[chosen], self.sources[chosen])


class KeyPositions:
    """Compute the positions of given samples in the epochs of one read order.

    Args:
        order: read order.
        tables: shard tables by digest; must contain those of the order's splits.
        places: shards and rows of the samples, by index of the split in `order.tables`; a split that has none of the
            samples may be absent.

    Attributes:
        keys: `int64[n]`, indices in the list of requested keys: only keys that the order serves. An index is
            repeated if several splits have the key.
        num_samples: number of samples of an epoch.
    """

    def __init__(
        self, order: ReadOrder, tables: Mapping[Digest, ShardTable], places: Mapping[int, KeyPlaces]
    ) -> None:
        self._order = order
        self._counts = [tables[digest].samples_per_shard for digest in order.tables]
        self._places = {source: split_places for source, split_places in places.items() if len(split_places.keys)}
        self.keys = concatenate(split_places.keys for split_places in self._places.values())
        sizes = [int(counts.sum()) for counts in self._counts]
        self.num_samples = sizes[0]
        self._mixed: MixOrder | None = None  # None for a single split
        if order.mix is not None:
            self.num_samples = order.mix.epoch_samples
            self._mixed = MixOrder(
                sizes,
                order.mix.weights,
                epoch_samples=order.mix.epoch_samples,
                block=order.mix.block,
                seed=order.config.seed,
            )

    def find(self, epoch: int) -> Served:
        """Return the positions of the samples in an epoch."""
        parts = [self._find(source, places, epoch) for source, places in self._places.items()]
        served = Served(
            concatenate(part.positions for part in parts),
            concatenate(part.keys for part in parts),
            concatenate(part.sources for part in parts),
        )
        return served[np.argsort(served.positions, kind="stable")]

    def _find(self, source: int, places: KeyPlaces, epoch: int) -> Served:
        """Return the positions of the samples of one split."""
        if self._mixed is None:
            order = AccessOrder(self._counts[source], self._order.config, epoch)
            positions = order.positions_of(places.shards, places.rows)
            return Served(positions, places.keys, np.full(len(positions), source))
        return self._find_mixed(self._mixed, source, places, epoch)

    def _find_mixed(self, mixed: MixOrder, source: int, places: KeyPlaces, epoch: int) -> Served:
        """Return the positions at which an epoch of a mixture serves the samples of one split."""
        counts = self._counts[source]
        # In a mixture, each split has an access order with a seed of its own.
        config = own_order(self._order.config, self._order.tables[source])
        size = int(counts.sum())
        # An ordinal numbers the samples of this split through all its epochs: from 0 in epoch 0, from `size` in epoch
        # 1. An epoch of the mixture serves the ordinals `start` to `stop` - 1, which need not be whole split epochs.
        # `cursors` returns the split epoch and position with which this and the next epoch of the mixture begin.
        first_epoch, first_position = mixed.cursors(epoch, 0)[source]
        last_epoch, last_position = mixed.cursors(epoch + 1, 0)[source]
        start = first_epoch * size + first_position
        stop = last_epoch * size + last_position
        ordinals, keys = [], []
        for split_epoch in mixed.own_epochs(source, epoch):
            split_positions = AccessOrder(counts, config, split_epoch).positions_of(places.shards, places.rows)
            split_ordinals = split_epoch * size + split_positions
            is_served = (split_ordinals >= start) & (split_ordinals < stop)
            ordinals.append(split_ordinals[is_served])
            keys.append(places.keys[is_served])
        # `line_of` returns positions counted through all epochs of the mixture; subtract those of earlier epochs.
        positions = mixed.line_of(source, concatenate(ordinals)) - epoch * self.num_samples
        return Served(positions, concatenate(keys), np.full(len(positions), source))
