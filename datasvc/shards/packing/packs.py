"""The packs of a view, and the access order that counts them: a position serves a pack, which is several documents.

The packs of a shard have documents of this shard only, so windows of shards are those of an order of samples. They
are stored as numbers of the shard (`pack_objects`): the number of pieces of each pack, and then the row among the
live samples, the start and the size of all pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from datasvc.keyed_random import Integers
from datasvc.order import AccessOrder, OrderConfig
from datasvc.repository import Objects
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.format.view_table import Packing
from datasvc.shards.packing.best_fit import Packed
from datasvc.shards.packing.pack_objects import PackReader
from datasvc.shards.packing.row_cache import RowCache

_MAX_NUMBERS: Final = 24 << 20  # of packs in memory, with 4 bytes each


def encode_packs(packed: Packed) -> Integers:
    """Return the packs of a shard as the numbers that are stored: `int64[n]`."""
    return np.concatenate([packed.counts, packed.rows, packed.starts, packed.sizes])


class Packs:
    """The packs of a table. Safe for use by several threads.

    Args:
        objects: objects of the repository.
        table: the table.
        packing: its packing.
    """

    def __init__(self, objects: Objects, table: ShardTable, packing: Packing) -> None:
        self._packing = packing
        self._num_packs, self._num_live = table.positions_per_shard, table.samples_per_shard
        self._reader = PackReader(objects, packing.objects, "packs")
        self._numbers = RowCache(_MAX_NUMBERS)

    def of(self, shard: int) -> Packed:
        """Return the packs of a shard; do not modify the arrays.

        Raises:
            CorruptDataError, NotFoundError, UnavailableError: their object cannot be read.
        """
        bounds, pieces = self._get(shard)
        rows, starts, sizes = pieces.astype(np.int64)
        firsts = bounds.astype(np.int64)
        return Packed(rows, starts, sizes, firsts[1:] - firsts[:-1])

    def pieces(self, shard: int, packs: Integers) -> tuple[Integers, Packed]:
        """Return the pieces of some packs of a shard, pack after pack; for `packs`, `int64[n]`, and errors see `of`.

        Returns:
            The index in `packs` of each piece, `int64[pieces]`, and the pieces.
        """
        bounds, every = self._get(shard)
        firsts = bounds[packs].astype(np.int64)
        counts = bounds[packs + 1] - firsts
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        chosen = np.repeat(firsts, counts) + within
        rows, starts, sizes = every[:, chosen].astype(np.int64)
        return np.repeat(np.arange(len(packs)), counts), Packed(rows, starts, sizes, counts)

    def _get(self, shard: int) -> tuple[Integers, Integers]:
        """Return the first piece of each pack, with the number of all as the last one, and rows, starts and sizes."""
        numbers = self._numbers.get(shard, lambda: self._read(shard))
        num_bounds = int(self._num_packs[shard]) + 1
        return numbers[:num_bounds], numbers[num_bounds:].reshape(3, -1)

    def _read(self, shard: int) -> Integers:
        num_packs, num_live = int(self._num_packs[shard]), int(self._num_live[shard])
        # A piece is the last one of its document, or fills a pack.
        numbers = self._reader.read(shard, max_values=num_packs + 3 * (num_live + num_packs))
        counts, pieces = numbers[:num_packs], numbers[num_packs:]
        if len(counts) < num_packs or len(pieces) != 3 * counts.sum() or not counts.all():
            raise self._reader.corrupt(shard, f"shard {shard} has another number of packs")
        rows, _, sizes = pieces.reshape(3, -1)
        tokens = np.add.reduceat(sizes, np.cumsum(counts) - counts) if num_packs else sizes
        if rows.max(initial=-1) >= num_live or not sizes.all() or tokens.max(initial=0) > self._packing.block_tokens:
            raise self._reader.corrupt(shard, f"a pack of shard {shard} has a sample or a size that is out of range")
        # Bounds in place of counts: a batch reads only those of its packs. Half of the memory of int64.
        return np.concatenate([[0], np.cumsum(counts), pieces]).astype(np.uint32)


class PackedOrder(AccessOrder):
    """The access order of a table with packs: `locate` returns shards, and the numbers of packs in these shards.

    Args:
        table: the table.
        packs: its packs.
        config: parameters of the order.
        epoch: number of the epoch.
    """

    def __init__(self, table: ShardTable, packs: Packs, config: OrderConfig, epoch: int) -> None:
        super().__init__(table.positions_per_shard, config, epoch)
        self._packs = packs

    def samples_at(self, positions: Integers) -> tuple[Integers, Integers, Integers]:
        """Return the documents at positions, see `AccessOrder`. Raise also what `Packs.of` raises."""
        shards, packs = self.locate(positions)
        parts = [(np.empty(0, np.int64),) * 3]
        for shard in np.unique(shards).tolist():
            wanted = np.flatnonzero(shards == shard)
            index, pieces = self._packs.pieces(shard, packs[wanted])
            parts.append((wanted[index], np.full(len(index), shard), pieces.rows))
        indices, of_shards, rows = (np.concatenate(values) for values in zip(*parts, strict=True))
        order = np.argsort(indices, kind="stable")
        return indices[order], of_shards[order], rows[order]

    def copies_of(self, shards: Integers, rows: Integers) -> tuple[Integers, Integers]:
        """Return the positions of the packs of some documents, see `AccessOrder`. Raise what `Packs.of` raises."""

        def served(shard: int) -> tuple[Integers, Integers]:
            packed = self._packs.of(shard)
            return packed.rows.astype(np.int64), np.repeat(np.arange(len(packed.counts)), packed.counts)

        return find_copies(self, shards, rows, served)


def find_copies(
    order: AccessOrder, shards: Integers, rows: Integers, served: Callable[[int], tuple[Integers, Integers | None]]
) -> tuple[Integers, Integers]:
    """Return all positions at which an order that does not count live samples serves some of them.

    Args:
        order: the order.
        shards: `int64[n]`, shards of the samples.
        rows: `int64[n]`, their rows among the live samples of these shards.
        served: for a shard, the row of each sample that an epoch serves, and the row in the order that serves it;
            None: these are 0, 1, ...

    Returns:
        See `AccessOrder.copies_of`.
    """
    samples, found, of_shards = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for shard in np.unique(shards).tolist():
        wanted = np.flatnonzero(shards == shard)
        by_row, in_order = served(shard)
        sorted_ = np.argsort(by_row, kind="stable")
        first, stop = (np.searchsorted(by_row[sorted_], rows[wanted], side=side) for side in ("left", "right"))
        counts = stop - first
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        chosen = sorted_[np.repeat(first, counts) + within]
        samples.append(np.repeat(wanted, counts))
        found.append(chosen if in_order is None else in_order[chosen])
        of_shards.append(np.full(len(within), shard))
    positions = order.positions_of(np.concatenate(of_shards), np.concatenate(found))
    return np.concatenate(samples), positions
