"""Weights of a view's samples, and the access order of a weighted split.

A weighted table has the sum of the weights of each shard. The weights of the samples are in *packs*, objects of up to
64 MB for consecutive shards, which are read when a shard of theirs is located. For the number of times that an epoch
serves a sample, see `epoch_grid`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
import zstandard

from datasvc.errors import CorruptDataError
from datasvc.keyed_random import Integers
from datasvc.order import AccessOrder, OrderConfig
from datasvc.repository import Digest, Objects
from datasvc.shards.format.epoch_grid import EpochGrid
from datasvc.shards.format.ipc_reader import decode_table, encode_table
from datasvc.shards.format.shard_table import ShardTable, WeightPack
from datasvc.shards.versions.deletions import RowCache

WEIGHTS_FORMAT: Final = 1
MAX_WEIGHT: Final = (1 << 20) - 1
_FORMAT_KEY: Final = b"datasvc.weights.format"
_SCHEMA: Final = pa.schema(
    [pa.field("shard", pa.int64(), nullable=False), pa.field("weights", pa.large_binary(), nullable=False)],
    metadata={_FORMAT_KEY: str(WEIGHTS_FORMAT).encode()},
)
_PACK_BYTES: Final = 64_000_000
# Compressed packs in memory, and rows of `served_rows`, with 8 bytes each.
_MAX_PACKS: Final = 8
_MAX_ROWS: Final = 8 << 20


class PackWriter:
    """Stores the weights of a table's shards, which are added in table order."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._shards: list[int] = []
        self._contents: list[bytes] = []
        self._packs: list[WeightPack] = []
        self._num_shards = self._num_bytes = 0

    def add(self, weights: Integers) -> None:
        """Add the weights of the live samples of the next shard: `int64[live]` in 1..MAX_WEIGHT."""
        self._shards.append(self._num_shards)
        self._contents.append(zstandard.compress(weights.astype("<u4").tobytes()))
        self._num_shards += 1
        self._num_bytes += len(self._contents[-1])
        if self._num_bytes >= _PACK_BYTES:
            self._flush()

    def finish(self) -> tuple[WeightPack, ...]:
        """Return the packs of all shards."""
        if self._shards:
            self._flush()
        return tuple(self._packs)

    def _flush(self) -> None:
        pack = encode_table(pa.table([self._shards, self._contents], schema=_SCHEMA))
        self._packs.append(WeightPack(self._shards[0], self._objects.put(pack).digest))
        self._shards, self._contents, self._num_bytes = [], [], 0


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
        self._firsts = np.array([pack.first_shard for pack in table.weights], np.int64)
        self._packs: OrderedDict[Digest, pa.Table] = OrderedDict()  # least recently used first
        self._rows = RowCache(_MAX_ROWS)
        self._lock = threading.Lock()

    def of(self, shard: int) -> Integers:
        """Return the weights of the live samples of a shard: `int64[live]`.

        Raises:
            CorruptDataError, NotFoundError, UnavailableError: their pack cannot be read.
        """
        pack = self._table.weights[int(np.searchsorted(self._firsts, shard, side="right")) - 1]
        table = self._read_pack(pack)
        try:
            content = table.column("weights")[shard - pack.first_shard].as_py()
            count = int(self._counts[shard])
            raw = zstandard.decompress(content, max_output_size=4 * count)
            weights = np.frombuffer(raw, "<u4").astype(np.int64)
            if len(weights) != count or int(weights.sum()) != int(self._sums[shard]) or not weights.all():
                raise ValueError(f"shard {shard} has other weights than its table lists")  # noqa: TRY301
        except (zstandard.ZstdError, IndexError, ValueError) as error:
            location = self._objects.location(pack.digest)
            raise CorruptDataError(f"{location} does not have the weights of its table: {error}") from error
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

    def _read_pack(self, pack: WeightPack) -> pa.Table:
        with self._lock:
            if pack.digest in self._packs:
                self._packs.move_to_end(pack.digest)
                return self._packs[pack.digest]
        name = self._objects.location(pack.digest)
        content = self._objects.read(pack.digest)
        table = decode_table(
            content, name, what="pack of weights", format_key=_FORMAT_KEY, latest=WEIGHTS_FORMAT, columns=_SCHEMA
        )
        with self._lock:
            self._packs[pack.digest] = table
            while len(self._packs) > _MAX_PACKS:
                self._packs.popitem(last=False)
        return table


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
        self._firsts = np.cumsum(counts) - counts
        # The rows of all shards, which are found when a position needs them; None if they would take too much memory.
        self._all_rows = np.empty(self.num_samples, np.int32) if self.num_samples <= _MAX_ROWS else None
        self._is_found = np.zeros(len(counts), np.bool_)

    def locate(self, positions: Integers | Sequence[int]) -> tuple[Integers, Integers]:
        """Return the sample at each position, see `AccessOrder`. Raise also what `Weights.of` raises."""
        shards, rows = super().locate(positions)
        if self._all_rows is not None:
            for shard in np.unique(shards[~self._is_found[shards]]).tolist():
                found = self._served_rows(shard)
                self._all_rows[self._firsts[shard] : self._firsts[shard] + len(found)] = found
                self._is_found[shard] = True
            return shards, self._all_rows[self._firsts[shards] + rows].astype(np.int64)
        by_shard = np.argsort(shards, kind="stable")
        cuts = np.flatnonzero(np.diff(shards[by_shard])) + 1
        bounds = [0, *cuts.tolist(), len(by_shard)] if len(by_shard) else []
        for start, stop in pairwise(bounds):
            chosen = by_shard[start:stop]
            rows[chosen] = self._served_rows(int(shards[chosen[0]]))[rows[chosen]]
        return shards, rows

    def copies_of(self, shards: Integers, rows: Integers) -> tuple[Integers, Integers]:
        """Return all positions of some samples, see `AccessOrder`. Raise what `Weights.of` raises."""
        samples, served, of_shards = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for shard in np.unique(shards).tolist():
            wanted = np.flatnonzero(shards == shard)
            by_row = self._served_rows(shard)
            order = np.argsort(by_row, kind="stable")
            first, stop = (np.searchsorted(by_row[order], rows[wanted], side=side) for side in ("left", "right"))
            counts = stop - first
            within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            samples.append(np.repeat(wanted, counts))
            served.append(order[np.repeat(first, counts) + within])
            of_shards.append(np.full(len(within), shard))
        positions = self.positions_of(np.concatenate(of_shards), np.concatenate(served))
        return np.concatenate(samples), positions


def open_order(table: ShardTable, weights: Weights | None, config: OrderConfig, epoch: int) -> AccessOrder:
    """Return the access order of an epoch of a split; `weights` are None for a table without weights."""
    if weights is None:
        return AccessOrder(table.samples_per_shard, config, epoch)
    return WeightedOrder(table, weights, config, epoch)
