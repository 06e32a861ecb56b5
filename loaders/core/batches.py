"""Order + rank + shards -> batches of zero-copy sample views.

Shards are opened when a batch needs them first and released once every batch that needs them was handed over, so
what a loader holds of a cache is what its order promised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.loaders.core.mixture import Mixture, label_maps, name_of, own_orders, splits_of, weighted_splits
from datasvc.loaders.core.sample_locations import LocatedStep, SampleLocations, locate_epoch
from datasvc.loaders.core.split_reader import Cursor, ShardPart, SplitReader
from datasvc.mix_order import MixOrder
from datasvc.order import OrderConfig, Step, Tail
from datasvc.shards import Shard, ShardStore, Split
from datasvc.shards.format.mapped_file import Bytes
from datasvc.shards.format.schema import LABEL

__all__ = ["Cursor", "SampleBatch", "SampleBatches", "ShardPart"]

_CURSORS_KEPT: Final = 64


class SampleBatch(NamedTuple):
    """One rank's part of a global batch, not yet decoded.

    Attributes:
        epoch: of the batch.
        step: positions of the global batch.
        positions: `int64[n]`, of this rank's samples.
        mask: `bool[n]`, False for samples that only pad.
        shards: `int64[n]`, number of each sample's shard in the shard table of its split.
        rows: `int64[n]`, its row there, deleted samples counted too.
        blobs: views of the encoded images, `uint8[size]` each; they keep their mapping alive. Empty where no blob
            column was asked for.
        columns: other columns of fixed width, `dtype[n]` by name.
        parts: the same samples shard by shard, for decoders that read columns of other kinds.
        sources: `int64[n]`, number of each sample's split in the mixture; zeros without one.
    """

    epoch: int
    step: Step
    positions: Integers
    mask: npt.NDArray[np.bool_]
    shards: Integers
    rows: Integers
    blobs: list[Bytes]
    columns: dict[str, npt.NDArray[Any]]
    parts: Sequence[ShardPart]
    sources: Integers

    @property
    def pads(self) -> bool:
        """Whether the step fills a batch with samples that only pad; this rank's part may have none."""
        return self.step.stop > self.step.num_samples

    @property
    def holders(self) -> list[Shard]:
        """The shard of each sample, `n` of them."""
        by_index = {index: part.shard for part in self.parts for index in part.indices.tolist()}
        return [by_index[index] for index in range(len(self.positions))]

    @property
    def before(self) -> Cursor:
        """Where the run stands until this batch is served."""
        return Cursor(self.epoch, self.step.start)

    @property
    def after(self) -> Cursor:
        """Where the run stands once this batch is served."""
        return Cursor(self.epoch, self.step.next_position)


class SampleBatches:
    """One rank's endless stream of batches, epoch after epoch, from any cursor.

    Args:
        samples: a split, or a mixture of several.
        store: where shards are read from; for a mixture one for each of its splits.
        config: the order's parameters.
        batch_size: samples of this rank per step.
        rank: data-parallel rank.
        world_size: number of data-parallel ranks.
        tail: what becomes of the samples that fill no global batch.
        blob: column with the encoded images; None: no blobs are read.
        columns: other columns, of fixed width, to deliver beside.

    Raises:
        ConfigError: a split has no such column, or of another type than the first; or, when a batch is read, a sample
            of it is null there.
    """

    def __init__(
        self,
        samples: Split | Mixture,
        store: ShardStore | Sequence[ShardStore],
        config: OrderConfig,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        tail: Tail,
        blob: str | None,
        columns: tuple[str, ...],
    ) -> None:
        stores = store if isinstance(store, Sequence) else [store]
        weighted = weighted_splits(samples)
        labels = label_maps(samples) if LABEL in columns else [None] * len(splits_of(samples))
        self._readers = {
            number: SplitReader(split, stores[number], own, blob=blob, columns=columns, labels=labels[number])
            for number, (split, own) in enumerate(zip(splits_of(samples), own_orders(samples, config), strict=True))
            if split in weighted
        }
        self._locator: _SplitLocator | _Mixed = (
            _Mixed(samples.order(config.seed), self._readers)
            if isinstance(samples, Mixture)
            else _SplitLocator(self._readers[0], config.lanes)
        )
        self._batch_size = batch_size
        self._rank, self._world_size, self._tail = rank, world_size, tail
        self._blob = blob
        self._types = _common_types(list(self._readers.values()), columns)
        self._needs_values = blob is not None or bool(columns)

    def stream(self, cursor: Cursor) -> Iterator[SampleBatch]:
        """Yield batches from `cursor` on, for ever. At least one step must fit into an epoch."""
        for number, own in self._locator.cursors(cursor).items():
            self._readers[number].advance(own)
        while True:
            for located in locate_epoch(
                self._locator,
                cursor.epoch,
                cursor.position,
                batch_size=self._batch_size,
                rank=self._rank,
                world_size=self._world_size,
                tail=self._tail,
            ):
                yield self._read(cursor.epoch, located)
            cursor = Cursor(cursor.epoch + 1, 0)

    def retire(self, batch: SampleBatch) -> None:
        """Say that `batch` and all before it were handed over; shards that nothing needs any more are released."""
        for number, own in self._locator.cursors(batch.after).items():
            self._readers[number].retire(own, batch.before)

    def close(self) -> None:
        """Release every shard; a new `stream` opens them again."""
        for reader in self._readers.values():
            reader.close()

    def describe(self, batch: SampleBatch, index: int) -> str:
        """Name one sample for a message: split, shard and key."""
        reader = self._readers[int(batch.sources[index])]
        return reader.describe(int(batch.shards[index]), int(batch.rows[index]), batch.holders[index])

    def _read(self, epoch: int, located: LocatedStep) -> SampleBatch:
        step, positions, mask, found, by_split = located
        self._use_shards(Cursor(epoch, step.start), Cursor(epoch, step.next_position), located)
        blobs: list[Any] = [] if self._blob is None else [None] * len(positions)
        columns = {name: np.empty(len(positions), kind) for name, kind in self._types.items()}
        parts: list[ShardPart] = []
        for number, by_shard in by_split.items():
            reader = self._readers[number]
            opened = reader.open(by_shard, found.rows)
            parts += opened
            if not self._needs_values:
                continue
            for part in opened:
                if self._blob is not None:
                    views = part.shard.blobs(self._blob, part.rows)
                    for index, view in zip(part.indices.tolist(), views, strict=True):
                        blobs[index] = view
                for name, values in columns.items():
                    values[part.indices] = reader.values(part, name)
        return SampleBatch(
            epoch, step, positions, mask, found.shards, found.rows, blobs, columns, parts, found.sources
        )

    def _use_shards(self, start: Cursor, stop: Cursor, located: LocatedStep) -> None:
        """Let every reader use the shards that the batch needs."""
        before, after = self._locator.cursors(start), self._locator.cursors(stop)
        pads = located.step.stop > located.step.num_samples
        found = located.located
        for number, reader in self._readers.items():
            own_before, own_after = before[number], after[number]
            reader.use(own_before, own_after)
            if pads or own_after.epoch > own_before.epoch + 1:
                inside = (found.epochs > own_before.epoch) & (found.epochs < own_after.epoch)
                kept = (found.sources == number) & (inside | ~located.mask)
                reader.keep(np.unique(found.shards[kept]).tolist(), start)


class _SplitLocator:
    """A `SampleLocator`: the positions of a split are those of its own order."""

    def __init__(self, reader: SplitReader, lanes: int) -> None:
        self._reader = reader
        self.num_samples = len(reader.split)
        self.lanes = lanes

    def cursors(self, cursor: Cursor) -> Mapping[int, Cursor]:
        return {0: cursor}

    def locate(self, epoch: int, positions: Integers) -> SampleLocations:
        shards, rows = self._reader.locate(epoch, positions)
        return SampleLocations(np.zeros_like(positions), np.full_like(positions, epoch), shards, rows)


class _Mixed:
    """A `SampleLocator`: positions are dealt to splits, each with an order and epochs of its own."""

    # Those of each split's order: in a mixture a run of positions lies on them in no fixed way.
    lanes = 1

    def __init__(self, order: MixOrder, readers: Mapping[int, SplitReader]) -> None:
        self._order = order
        self._readers = readers
        self.num_samples = order.num_samples
        self._known: dict[Cursor, Mapping[int, Cursor]] = {}

    def cursors(self, cursor: Cursor) -> Mapping[int, Cursor]:
        """Return where the own order of each split stands."""
        # Asked for three times: as the end of a batch, as the start of the next, and when the first is retired.
        if cursor not in self._known:
            if len(self._known) >= _CURSORS_KEPT:
                self._known.clear()
            own = self._order.cursors(cursor.epoch, cursor.position)
            self._known[cursor] = {number: Cursor(*own[number]) for number in self._readers}
        return self._known[cursor]

    def locate(self, epoch: int, positions: Integers) -> SampleLocations:
        places = self._order.locate(epoch, positions)
        shards, rows = np.empty_like(positions), np.empty_like(positions)
        by_order = np.lexsort((places.epochs, places.sources))
        sources, epochs = places.sources[by_order], places.epochs[by_order]
        cuts = np.flatnonzero((np.diff(sources) != 0) | (np.diff(epochs) != 0)) + 1
        for chosen in np.split(by_order, cuts) if len(positions) else []:
            source, own_epoch = int(places.sources[chosen[0]]), int(places.epochs[chosen[0]])
            shards[chosen], rows[chosen] = self._readers[source].locate(own_epoch, places.positions[chosen])
        return SampleLocations(places.sources, places.epochs, shards, rows)


def _common_types(readers: Sequence[SplitReader], columns: Sequence[str]) -> dict[str, npt.DTypeLike]:
    """Return the type of each column's values. Raises ConfigError: two splits have it of different types."""
    first = readers[0]
    for reader in readers[1:]:
        for name in columns:
            kinds = [np.dtype(each.dtype(name)).name for each in (reader, first)]
            if kinds[0] != kinds[1]:
                raise ConfigError(
                    f"column {name!r} of {name_of(reader.split)} is {kinds[0]}, that of {name_of(first.split)} "
                    f"{kinds[1]}; a mixture needs one type"
                )
    return {name: first.dtype(name) for name in columns}
