"""Order + rank + shards -> batches of zero-copy sample views.

Shards are opened when a batch needs them first and released once every batch that needs them was handed over, so
what a loader holds of a cache is what its order promised.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError
from datasvc.keyed import Integers
from datasvc.order import AccessOrder, OrderConfig, Step, Tail, plan_step, slice_step
from datasvc.shards import Shard, ShardStore, Split, Wanted
from datasvc.shards.reader import Bytes


@dataclass(frozen=True)
class Cursor:
    """Where a run stands: everything of `epoch` before `position` was served."""

    epoch: int
    position: int


@dataclass(frozen=True)
class SampleBatch:
    """One rank's part of a global batch, not yet decoded.

    Attributes:
        epoch: of the batch.
        step: positions of the global batch.
        positions: `int64[n]`, of this rank's samples.
        mask: `bool[n]`, False for samples that only pad.
        shards: `int64[n]`, number of each sample's shard in the shard table.
        rows: `int64[n]`, its row there, deleted samples counted too.
        blobs: views of the encoded images, `uint8[size]` each; they keep their mapping alive.
        columns: other columns of fixed width, `dtype[n]` by name.
    """

    epoch: int
    step: Step
    positions: Integers
    mask: npt.NDArray[np.bool_]
    shards: Integers
    rows: Integers
    blobs: list[Bytes]
    columns: dict[str, npt.NDArray[Any]]

    @property
    def before(self) -> Cursor:
        """Where the run stands until this batch is served."""
        return Cursor(self.epoch, self.step.start)

    @property
    def after(self) -> Cursor:
        """Where the run stands once this batch is served."""
        return Cursor(self.epoch, self.step.next_position)


class _OpenShards:
    """The shards that one epoch's batches have open."""

    def __init__(self, split: Split, store: ShardStore, order: AccessOrder, start: int) -> None:
        self._table = split.table
        self._store = store
        self._windows = order.windows
        self._start = start
        self._activated = 0
        self._ends: list[tuple[int, int]] = []  # heap of (stop, shard)
        self._pieces: Counter[int] = Counter()
        self._open: dict[int, Shard] = {}

    def advance(self, stop: int) -> None:
        """Count the pieces of shards that positions before `stop` may need."""
        windows = self._windows
        until = int(np.searchsorted(windows.first, stop, side="left"))
        for piece in range(self._activated, until):
            if windows.stop[piece] > self._start:
                shard = int(windows.shards[piece])
                heapq.heappush(self._ends, (int(windows.stop[piece]), shard))
                self._pieces[shard] += 1
        self._activated = max(self._activated, until)

    def get(self, shard: int) -> Shard:
        if shard not in self._open:
            self._open[shard] = self._store.open_shard(self._table.shard(shard))
        return self._open[shard]

    def get_all(self, wanted: Mapping[int, Integers]) -> dict[int, Shard]:
        """Return the shards of the wanted rows, all of a shard or no more than these rows."""
        closed = {
            shard: Wanted(self._table.shard(shard), self._table.index(shard), rows)
            for shard, rows in wanted.items()
            if shard not in self._open
        }
        early = self._store.open_early(list(closed.values())) if closed else {}
        return {
            shard: early[closed[shard].info.digest]
            if shard in closed and closed[shard].info.digest in early
            else self.get(shard)
            for shard in wanted
        }

    def retire(self, position: int) -> None:
        """Release the shards that no position from `position` on needs."""
        while self._ends and self._ends[0][0] <= position:
            _, shard = heapq.heappop(self._ends)
            self._pieces[shard] -= 1
            if not self._pieces[shard]:
                del self._pieces[shard]
                self._release(shard)

    def close(self) -> None:
        for shard in list(self._open):
            self._release(shard)

    def _release(self, shard: int) -> None:
        if shard in self._open:
            self._store.release_shard(self._table.shard(shard))
            del self._open[shard]


class SampleBatches:
    """One rank's endless stream of batches, epoch after epoch, from any cursor.

    Args:
        split: the samples.
        store: where shards are read from.
        config: the order's parameters.
        batch_size: samples of this rank per step.
        rank: data-parallel rank.
        world_size: number of data-parallel ranks.
        tail: what becomes of the samples that fill no global batch.
        blob: column with the encoded images.
        columns: other columns, of fixed width, to deliver beside.

    Raises:
        ConfigError: the split has no such column; or, when a batch is read, a sample of it is null there.
    """

    def __init__(
        self,
        split: Split,
        store: ShardStore,
        config: OrderConfig,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        tail: Tail,
        blob: str,
        columns: tuple[str, ...],
    ) -> None:
        self._split = split
        self._store = store
        self._config = config
        self._global_batch = batch_size * world_size
        self._rank, self._world_size, self._tail = rank, world_size, tail
        self._blob, self._columns = blob, columns
        self._check_columns()
        self._counts = split.table.samples_per_shard
        self._epochs: dict[int, tuple[AccessOrder, _OpenShards]] = {}

    def stream(self, cursor: Cursor) -> Iterator[SampleBatch]:
        """Yield batches from `cursor` on, for ever. At least one step must fit into an epoch."""
        num_samples = len(self._split)
        self._store.advance(cursor.epoch, cursor.position)
        while True:
            step = plan_step(cursor.position, num_samples, self._global_batch, self._tail)
            if step is None:
                cursor = Cursor(cursor.epoch + 1, 0)
                continue
            batch = self._read(cursor, step)
            yield batch
            cursor = batch.after

    def retire(self, batch: SampleBatch) -> None:
        """Say that `batch` and all before it were handed over; shards that nothing needs any more are released."""
        self._store.advance(batch.after.epoch, batch.after.position)
        for epoch in [epoch for epoch in self._epochs if epoch < batch.epoch]:
            self._epochs.pop(epoch)[1].close()
        self._epochs[batch.epoch][1].retire(batch.step.next_position)

    def close(self) -> None:
        """Release every shard; a new `stream` opens them again."""
        for _, shards in self._epochs.values():
            shards.close()
        self._epochs.clear()

    def describe(self, batch: SampleBatch, index: int) -> str:
        """Name one sample for a message: split, shard and key."""
        shard, row = int(batch.shards[index]), int(batch.rows[index])
        key = self._epochs[batch.epoch][1].get(shard).sample(row)["key"]
        digest = self._split.table.shard(shard).digest[:12]
        return f"{self._split.dataset}/{self._split.name}: {key!r} (row {row} of shard {digest}...)"

    def _read(self, cursor: Cursor, step: Step) -> SampleBatch:
        order, open_shards = self._epoch(cursor)
        positions, mask = slice_step(step, rank=self._rank, world_size=self._world_size, lanes=self._config.lanes)
        shards, rows = order.locate(positions)
        open_shards.advance(step.next_position)
        blobs: list[Any] = [None] * len(positions)
        schema = self._split.table.sample_schema
        columns = {
            name: np.empty(len(positions), schema.field(name).type.to_pandas_dtype()) for name in self._columns
        }
        chosen = {shard: np.flatnonzero(shards == shard) for shard in np.unique(shards).tolist()}
        for shard, indices in chosen.items():
            rows[indices] = self._split.stored_rows(shard, rows[indices])
        opened = open_shards.get_all({shard: rows[indices] for shard, indices in chosen.items()})
        for shard, indices in chosen.items():
            views = opened[shard].blobs(self._blob, rows[indices])
            for index, view in zip(indices.tolist(), views, strict=True):
                blobs[index] = view
            for name in self._columns:
                columns[name][indices] = self._values(opened[shard], name, rows[indices])
        return SampleBatch(cursor.epoch, step, positions, mask, shards, rows, blobs, columns)

    def _values(self, shard: Shard, column: str, rows: Integers) -> npt.NDArray[Any]:
        if not shard.is_valid(column, rows):
            raise ConfigError(
                f"column {column!r} of {self._split.dataset}/{self._split.name} is null for samples of shard "
                f"{shard.name}: they were added without it; delete them, or ask for columns that every sample has"
            )
        values: npt.NDArray[Any] = shard.values(column)[rows]
        return values

    def _check_columns(self) -> None:
        names = self._split.table.sample_schema.names
        for column in (self._blob, *self._columns):
            if column not in names:
                raise ConfigError(
                    f"{self._split.dataset}/{self._split.name} has no column {column!r}; its columns are {names}"
                )

    def _epoch(self, cursor: Cursor) -> tuple[AccessOrder, _OpenShards]:
        if cursor.epoch not in self._epochs:
            order = AccessOrder(self._counts, self._config, cursor.epoch)
            shards = _OpenShards(self._split, self._store, order, cursor.position)
            self._epochs[cursor.epoch] = (order, shards)
        return self._epochs[cursor.epoch]
