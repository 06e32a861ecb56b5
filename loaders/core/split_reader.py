"""Reads the samples of one split in its access order, and opens and releases shards as the order needs them.

`SampleBatches` has one reader for each split of a loader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.loaders.core.mixture import check_column, name_of
from datasvc.loaders.core.open_shards import OpenShards, OrderedUses, WholeEpochUses
from datasvc.order import AccessOrder, OrderConfig
from datasvc.printable import count_text
from datasvc.shards import Shard, ShardStore, Split
from datasvc.shards.format.schema import LABEL, VIDEO, VIDEO_FRAMES
from datasvc.shards.packing.packs import Packs


class Cursor(NamedTuple):
    """Progress of a run, or of the order of one split: all positions of `epoch` before `position` are served."""

    epoch: int
    position: int


class Pieces(NamedTuple):
    """Which tokens of documents a batch has, and where in its blocks.

    Attributes:
        starts: `int64[k]`, position of the first token in the document.
        sizes: `int64[k]`, number of tokens.
        places: `int64[k]`, position of the first token in the block.
        is_masked: `bool[k]`, True for documents that the run masks.
    """

    starts: Integers
    sizes: Integers
    places: Integers
    is_masked: npt.NDArray[np.bool_]


class ShardPart(NamedTuple):
    """The samples of a batch that are in one shard; of a packed split, the documents of its packs.

    Attributes:
        shard: the shard, which stays open while it is referenced.
        indices: `int64[k]` ascending, indices of the samples in the batch. The documents of a pack have the same one.
        rows: `int64[k]`, rows of the samples in the shard's file.
        pieces: the tokens of the documents, pack after pack; None if the split is not packed.
    """

    shard: Shard
    indices: Integers
    rows: Integers
    pieces: Pieces | None = None


class SplitReader:
    """Reads samples of a split, and keeps its shards open as long as its order needs them.

    Args:
        split: the split.
        store: shard store that opens the shards of the split.
        config: parameters of the access order.
        blob: column of blobs; None: read no blobs.
        columns: other columns of fixed width.
        labels: the mixture's label for each label of the split, `int64[classes]`; None: labels are not mapped.

    Raises:
        ConfigError: the split lacks one of the columns.
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
        for column in columns if blob is None else (blob, *columns):
            check_column(split, column)
        # Of the decoders, only that of videos, which requests both, reads by `Shard.reader`.
        self._shards = OpenShards(split, store, in_parts=blob == VIDEO and VIDEO_FRAMES in columns)
        self._orders: dict[int, AccessOrder] = {}
        self._epoch_uses: dict[int, OrderedUses | WholeEpochUses] = {}  # references of `reference_range`, by epoch
        # References of `reference_shards`: (start of the batch, shard), in the order of the batches.
        self._batch_uses: deque[tuple[Cursor, int]] = deque()

    def locate(self, epoch: int, positions: Integers) -> tuple[Integers, Integers]:
        """Return the shard and the row in its file of each position of an epoch; of packs, their numbers."""
        shards, rows = self._order(epoch).locate(positions)
        return shards, rows if self.split.packs is not None else self.split.stored_rows_of(shards, rows)

    def advance(self, cursor: Cursor) -> None:
        """Report the cursor of the split's order to the store."""
        self._store.advance(cursor.epoch, cursor.position)

    def reference_range(self, before: Cursor, after: Cursor) -> None:
        """Add references to the shards of a global batch that moves the split's order from `before` to `after`.

        `retire` drops a reference when the order's cursor has passed the last position that needs the shard. Epochs
        that begin and end inside the batch get no references here: use `reference_shards` for their shards.
        """
        if before == after:
            return
        self._reference(before.epoch, before.position, after.position if after.epoch == before.epoch else None)
        if after.epoch > before.epoch and after.position:
            self._reference(after.epoch, 0, after.position)

    def reference_shards(self, shards: Iterable[int], batch: Cursor) -> None:
        """Add references to shards. The `retire` of the batch that starts at `batch` drops them."""
        for shard in shards:
            self._shards.use(shard)
            self._batch_uses.append((batch, shard))

    def open(self, by_shard: Sequence[tuple[int, Integers]], rows: Integers) -> list[ShardPart]:
        """Return the samples of a batch that are in this split's shards.

        Args:
            by_shard: shards with the indices of their samples in the batch.
            rows: `int64[n]`, rows of all samples of the batch, from `locate`.
        """
        if self.split.packs is not None:
            return self._open_packs(self.split.packs, by_shard, rows)
        rows_by_shard = {shard: rows[indices] for shard, indices in by_shard}
        opened = self._shards.get_all(rows_by_shard)
        return [ShardPart(opened[shard], indices, rows_by_shard[shard]) for shard, indices in by_shard]

    def _open_packs(
        self, packs: Packs, by_shard: Sequence[tuple[int, Integers]], numbers: Integers
    ) -> list[ShardPart]:
        """Return the documents of the packs of a batch that are in this split's shards."""
        chosen = {shard: packs.pieces(shard, numbers[indices]) for shard, indices in by_shard}
        rows = {shard: self.split.stored_rows(shard, pieces.rows) for shard, (_, pieces) in chosen.items()}
        opened = self._shards.get_all(rows)
        parts = []
        for shard, indices in by_shard:
            index, pieces = chosen[shard]
            stops = np.cumsum(pieces.sizes)
            firsts = np.cumsum(pieces.counts) - pieces.counts  # first piece of each pack
            places = stops - pieces.sizes - (stops - pieces.sizes)[firsts][index]
            found = Pieces(pieces.starts, pieces.sizes, places, np.zeros(len(index), np.bool_))
            parts.append(ShardPart(opened[shard], indices[index], rows[shard], found))
        return parts

    def retire(self, cursor: Cursor, batch: Cursor) -> None:
        """Record that the batch that starts at `batch` is handed over. The split's order is then at `cursor`."""
        self.advance(cursor)
        # Few batches end an epoch: this cheap comparison skips the loops for all others.
        if min(self._orders, default=cursor.epoch) < cursor.epoch:
            for epoch in [epoch for epoch in self._orders if epoch < cursor.epoch]:
                del self._orders[epoch]
            for epoch in [epoch for epoch in self._epoch_uses if epoch < cursor.epoch]:
                self._epoch_uses.pop(epoch).close()
        if cursor.epoch in self._epoch_uses:
            self._epoch_uses[cursor.epoch].retire(cursor.position)
        while self._batch_uses and self._batch_uses[0][0] <= batch:
            self._shards.drop(self._batch_uses.popleft()[1])

    def values(self, part: ShardPart, column: str) -> npt.NDArray[Any]:
        """Return a copy of a part's values of a fixed-width column, `dtype[k]`. Raises ConfigError: one is null."""
        if not part.shard.is_valid(column, part.rows):
            is_absent = column not in part.shard.schema.names
            valid = None if is_absent else part.shard.column(column).is_valid().to_numpy()[part.rows]
            null_rows = part.rows if valid is None else part.rows[~valid]
            found = (
                "which has no such column: its samples were added without it" if is_absent else "which has no value"
            )
            raise ConfigError(
                f"column {column!r} of {name_of(self.split)} is null for {count_text(len(null_rows), 'sample')} of "
                f"a batch, such as {part.shard.items('key', null_rows[:1])[0]!r} in shard {part.shard.name}, "
                f"{found}; "
                "delete these samples, or request columns that every sample has"
            )
        values: npt.NDArray[Any] = part.shard.values(column)[part.rows]
        return values if column != LABEL or self._labels is None else self._map_labels(values, self._labels, part)

    def _map_labels(self, labels: npt.NDArray[Any], mapping: npt.NDArray[Any], part: ShardPart) -> npt.NDArray[Any]:
        """Return the mixture's labels for a split's labels. Negative labels stand for no class and do not change."""
        if (labels >= len(mapping)).any():
            raise ConfigError(
                f"{name_of(self.split)} has the label {labels.max()} in shard {part.shard.name}, but only "
                f"{len(mapping)} class names; ingest it with all class names"
            )
        has_class = labels >= 0
        mapped: npt.NDArray[Any] = np.where(has_class, mapping[np.where(has_class, labels, 0)], labels)
        return mapped.astype(labels.dtype)

    def dtype(self, column: str) -> npt.DTypeLike:
        """Return the dtype of a column of fixed width."""
        dtype: npt.DTypeLike = self.split.table.sample_schema.field(column).type.to_pandas_dtype()
        return dtype

    def describe(self, shard: int, row: int, opened: Shard) -> str:
        """Return the name of one sample for messages: split, shard and key.

        Args:
            shard: index of the sample's shard.
            row: the sample's row in the shard's file.
            opened: the shard; it has at least the sample's row.
        """
        (key,) = opened.items("key", np.array([row]))  # not the sample, which may have a large blob
        digest = self.split.table.shard(shard).digest[:12]
        return f"{name_of(self.split)}: {key!r} (row {row} of shard {digest}...)"

    def close(self) -> None:
        """Release all shards; a later read opens them again."""
        self._orders.clear()
        self._epoch_uses.clear()
        self._batch_uses.clear()
        self._shards.close()

    def _order(self, epoch: int) -> AccessOrder:
        if epoch not in self._orders:
            self._orders[epoch] = self.split.access_order(self._config, epoch)
        return self._orders[epoch]

    def _reference(self, epoch: int, start: int, stop: int | None) -> None:
        """Add references for the positions [start, stop) of an epoch; `stop` None: to the end of the epoch."""
        if epoch not in self._epoch_uses:
            order = self._order(epoch)
            self._epoch_uses[epoch] = (
                WholeEpochUses(self._shards, order.num_samples)
                if self._config.shuffle == "global"
                else OrderedUses(self._shards, order, start)
            )
        self._epoch_uses[epoch].advance(self.split.num_positions if stop is None else stop)
