"""One split's samples through a store, epoch after epoch of its own order: where they lie, and its open shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.loaders.core.open_shards import OpenShards, OrderedUses, WholeEpochUses
from datasvc.order import AccessOrder, OrderConfig
from datasvc.shards import Shard, ShardStore, Split
from datasvc.shards.format.schema import LABEL


class Cursor(NamedTuple):
    """Where a run, or a split's own order, stands: everything of `epoch` before `position` was served."""

    epoch: int
    position: int


class ShardPart(NamedTuple):
    """The samples of a batch that lie in one shard.

    Attributes:
        shard: open for as long as it is referenced.
        indices: `int64[k]` ascending, of the samples in the batch.
        rows: `int64[k]`, rows of the shard's file.
    """

    shard: Shard
    indices: Integers
    rows: Integers


class SplitReader:
    """Reads samples of a split, and holds its shards for as long as its order needs them.

    Args:
        split: the samples.
        store: where shards are read from.
        config: the order's parameters.
        blob: column of blobs; None: there is none.
        columns: other columns, of fixed width.
        labels: what each label becomes, `int64[classes]`; None: it stays.

    Raises:
        ConfigError: the split has no such column.
    """

    def __init__(
        self,
        split: Split,
        store: ShardStore,
        config: OrderConfig,
        *,
        blob: str | None,
        columns: tuple[str, ...],
        labels: Integers | None = None,
    ) -> None:
        self.split = split
        self._store = store
        self._config = config
        self._labels = labels
        self._check_columns(blob, columns)
        self._counts = split.table.samples_per_shard
        self._shards = OpenShards(split, store)
        self._orders: dict[int, AccessOrder] = {}
        self._uses: dict[int, OrderedUses | WholeEpochUses] = {}
        self._kept: deque[tuple[Cursor, int]] = deque()  # shards that no order's uses cover, by their batch

    def locate(self, epoch: int, positions: Integers) -> tuple[Integers, Integers]:
        """Return which samples positions of an epoch serve: shards and rows, deleted samples left out."""
        return self._order(epoch).locate(positions)

    def advance(self, cursor: Cursor) -> None:
        """Tell the store where the split's own order stands."""
        self._store.advance(cursor.epoch, cursor.position)

    def use(self, before: Cursor, after: Cursor) -> None:
        """Use the shards of a batch, over all ranks, that takes the own order from one cursor to another.

        Epochs that begin and end inside the batch are not covered, see `keep`.
        """
        if before == after:
            return
        self._use(before.epoch, before.position, after.position if after.epoch == before.epoch else None)
        if after.epoch > before.epoch and after.position:
            self._use(after.epoch, 0, after.position)

    def keep(self, shards: Iterable[int], batch: Cursor) -> None:
        """Use shards until the batch that starts at a cursor of the run is retired, whatever the order needs."""
        for shard in shards:
            self._shards.use(shard)
            self._kept.append((batch, shard))

    def open(self, by_shard: Sequence[tuple[int, Integers]], rows: Integers) -> list[ShardPart]:
        """Return the samples of a batch that lie in this split's shards.

        Args:
            by_shard: each shard with the indexes of its samples in the batch.
            rows: `int64[n]` of the batch as `locate` gave them; afterwards deleted samples are counted too.
        """
        wanted: dict[int, Integers] = {}
        for shard, indices in by_shard:
            located = rows[indices]
            wanted[shard] = self.split.stored_rows(shard, located)
            if wanted[shard] is not located:
                rows[indices] = wanted[shard]
        opened = self._shards.get_all(wanted)
        return [ShardPart(opened[shard], indices, wanted[shard]) for shard, indices in by_shard]

    def retire(self, cursor: Cursor, batch: Cursor) -> None:
        """Say that all before `cursor` of the own order was handed over, with the batch that starts at `batch`."""
        self.advance(cursor)
        if min(self._orders, default=cursor.epoch) < cursor.epoch:
            for epoch in [epoch for epoch in self._orders if epoch < cursor.epoch]:
                del self._orders[epoch]
            for epoch in [epoch for epoch in self._uses if epoch < cursor.epoch]:
                self._uses.pop(epoch).close()
        if cursor.epoch in self._uses:
            self._uses[cursor.epoch].retire(cursor.position)
        while self._kept and self._kept[0][0] <= batch:
            self._shards.drop(self._kept.popleft()[1])

    def values(self, part: ShardPart, column: str) -> npt.NDArray[Any]:
        """Return a column of fixed width: `dtype[k]`, a copy. Raises ConfigError: it is null for one of them."""
        if not part.shard.is_valid(column, part.rows):
            raise ConfigError(
                f"column {column!r} of {self.split.dataset}/{self.split.name} is null for samples of shard "
                f"{part.shard.name}: they were added without it; delete them, or ask for columns that every sample "
                "has"
            )
        values: npt.NDArray[Any] = part.shard.values(column)[part.rows]
        return values if column != LABEL or self._labels is None else self._translated(values, self._labels, part)

    def _translated(self, labels: npt.NDArray[Any], mapping: npt.NDArray[Any], part: ShardPart) -> npt.NDArray[Any]:
        """Return labels as the mixture numbers its classes; negative ones name no class, and stay."""
        if (labels >= len(mapping)).any():
            raise ConfigError(
                f"{self.split.dataset}/{self.split.name} has a label of {labels.max()} in {part.shard.name}, and "
                f"names {len(mapping)} classes only; ingest it with all class names"
            )
        named = labels >= 0
        translated: npt.NDArray[Any] = np.where(named, mapping[np.where(named, labels, 0)], labels)
        return translated.astype(labels.dtype)

    def dtype(self, column: str) -> npt.DTypeLike:
        """Return the dtype of a column of fixed width."""
        kind: npt.DTypeLike = self.split.table.sample_schema.field(column).type.to_pandas_dtype()
        return kind

    def describe(self, shard: int, row: int, opened: Shard) -> str:
        """Name one sample for a message: split, shard and key.

        Args:
            shard: its number.
            row: of its file.
            opened: the shard, or as much of it as was read for the sample: no more is fetched.
        """
        key = opened.sample(row)["key"]
        digest = self.split.table.shard(shard).digest[:12]
        return f"{self.split.dataset}/{self.split.name}: {key!r} (row {row} of shard {digest}...)"

    def close(self) -> None:
        """Release every shard; reading opens them again."""
        self._orders.clear()
        self._uses.clear()
        self._kept.clear()
        self._shards.close()

    def _order(self, epoch: int) -> AccessOrder:
        if epoch not in self._orders:
            self._orders[epoch] = AccessOrder(self._counts, self._config, epoch)
        return self._orders[epoch]

    def _use(self, epoch: int, start: int, stop: int | None) -> None:
        if epoch not in self._uses:
            order = self._order(epoch)
            self._uses[epoch] = (
                WholeEpochUses(self._shards, order.num_samples)
                if self._config.shuffle == "global"
                else OrderedUses(self._shards, order, start)
            )
        self._uses[epoch].advance(len(self.split) if stop is None else stop)

    def _check_columns(self, blob: str | None, columns: tuple[str, ...]) -> None:
        names = self.split.table.sample_schema.names
        for column in (blob, *columns):
            if column is not None and column not in names:
                raise ConfigError(
                    f"{self.split.dataset}/{self.split.name} has no column {column!r}; its columns are {names}"
                )
