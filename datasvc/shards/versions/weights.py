"""Weights of a view's samples, and the access order of a weighted split.

A weighted table has the sum of the weights of each shard. The weights of the samples are in *packs*, objects of up to
64 MB for consecutive shards, which are read when a shard of theirs is located. For the number of times that an epoch
serves a sample, see `view_table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from datasvc.keyed_random import Integers
from datasvc.order import AccessOrder, OrderConfig
from datasvc.repository import Objects
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.format.view_table import EpochGrid
from datasvc.shards.packing.groups import Aspects, GroupedOrder
from datasvc.shards.packing.pack_objects import PackReader
from datasvc.shards.packing.packs import PackedOrder, Packs, find_copies
from datasvc.shards.packing.row_cache import RowCache, RowMap

MAX_WEIGHT: Final = (1 << 20) - 1
# Rows of `served_rows` in memory, with 8 bytes each.
_MAX_ROWS: Final = 8 << 20


class Weights:
    """The weights of the live samples of a weighted table. Safe for use by several threads.

    Args:
        objects: objects of the repository.
        table: the table.
    """

    def __init__(self, objects: Objects, table: ShardTable) -> None:
        self._objects = objects
        self._table = table
        self._counts = table.samples_per_shard
        self._starts = np.cumsum(self._counts) - self._counts
        self._sums = table.weight_per_shard
        self._before = np.cumsum(self._sums) - self._sums
        self._packs = PackReader(objects, table.weights, "weights")
        self._rows = RowCache(_MAX_ROWS)

    def of(self, shard: int) -> Integers:
        """Return the weights of the live samples of a shard: `int64[live]`.

        Raises:
            CorruptDataError, NotFoundError, UnavailableError: their pack cannot be read.
        """
        count = int(self._counts[shard])
        weights = self._packs.read(shard, max_values=count)
        if len(weights) != count or int(weights.sum()) != int(self._sums[shard]) or not weights.all():
            raise self._packs.corrupt(shard, f"shard {shard} has other weights than its table lists")
        return weights

    def served_rows(self, shard: int, grid: EpochGrid) -> Integers:
        """Return the row among the live samples of each of the rows that an epoch serves of a shard: `int64[served]`.

        Copy k of all samples comes before copy k + 1 of any, so that an order without a shuffle, or with a small
        window, has the copies of a sample apart.
        """
        return self._rows.get((shard, grid.offset), lambda: self._find_served(shard, grid))

    def _find_served(self, shard: int, grid: EpochGrid) -> Integers:
        copies = grid.copies(int(self._before[shard]), int(self._starts[shard]), self.of(shard))
        samples = np.repeat(np.arange(len(copies)), copies)
        number = np.arange(len(samples)) - np.repeat(np.cumsum(copies) - copies, copies)  # of the copy of its sample
        return samples[np.argsort(number, kind="stable")] if len(copies) and copies.max() > 1 else samples


class WeightedOrder(AccessOrder):
    """The access order of a weighted table: `AccessOrder` over the rows that an epoch serves of each shard.

    `locate` returns rows among the live samples, as without weights, and may return a row several times.

    Args:
        table: the table.
        weights: its weights.
        config: parameters of the order.
        epoch: number of the epoch.
    """

    def __init__(self, table: ShardTable, weights: Weights, config: OrderConfig, epoch: int) -> None:
        counts = table.epoch_counts(config, epoch)
        super().__init__(counts, config, epoch)
        self._served_rows = partial(weights.served_rows, grid=table.epoch_grid(config, epoch))
        self._map = RowMap(counts, self._served_rows, _MAX_ROWS)

    def locate(self, positions: Integers | Sequence[int]) -> tuple[Integers, Integers]:
        """Return the sample at each position, see `AccessOrder`. Raise also what `Weights.of` raises."""
        shards, rows = super().locate(positions)
        return shards, self._map(shards, rows)

    def copies_of(self, shards: Integers, rows: Integers) -> tuple[Integers, Integers]:
        """Return all positions of some samples, see `AccessOrder`. Raise what `Weights.of` raises."""
        return find_copies(self, shards, rows, lambda shard: (self._served_rows(shard), None))


class OrderInputs(NamedTuple):
    """What the access order of a table needs beside it; None for what the table does not have."""

    weights: Weights | None = None
    packs: Packs | None = None
    aspects: Aspects | None = None


def open_order_inputs(objects: Objects, table: ShardTable) -> OrderInputs:
    """Return the weights of a table, its packs of documents, and the aspects of its images."""
    return OrderInputs(
        Weights(objects, table) if table.weights else None,
        Packs(objects, table, table.packing) if table.packing is not None else None,
        Aspects(objects, table, table.grouping) if table.grouping is not None else None,
    )


def open_order(table: ShardTable, inputs: OrderInputs, config: OrderConfig, epoch: int) -> AccessOrder:
    """Return the access order of an epoch of a split; for `inputs`, see `open_order_inputs`."""
    if inputs.packs is not None:
        return PackedOrder(table, inputs.packs, config, epoch)
    order = (
        AccessOrder(table.samples_per_shard, config, epoch)
        if inputs.weights is None
        else WeightedOrder(table, inputs.weights, config, epoch)
    )
    return order if inputs.aspects is None else GroupedOrder(order, inputs.aspects)
