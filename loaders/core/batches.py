"""Reads one rank's samples in the access order, as batches of zero-copy views of shards, for the loaders to decode.

A shard is opened for the first batch that needs it, and released after the last batch that needs it is handed
over to the caller. So a loader holds no more shards of a cache than its access order needs at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.ledger.broken_rounds import PickedStep
from datasvc.ledger.masked import NOTHING_MASKED, BatchMasks, Masked
from datasvc.loaders.core.locations import LocatedStep, MixtureLocator, SplitLocator, locate_epoch, locate_parts
from datasvc.loaders.core.mixture import Mixture, label_maps, name_of, split_orders, splits_of, weighted_splits
from datasvc.loaders.core.split_reader import Cursor, ShardPart, SplitReader
from datasvc.order import OrderConfig, Step, Tail
from datasvc.shards import Shard, ShardStore, Split
from datasvc.shards.format.mapped_file import Bytes
from datasvc.shards.format.schema import LABEL

__all__ = ["BatchDecoder", "Cursor", "SampleBatch", "SampleBatches", "ShardPart"]

B_co = TypeVar("B_co", covariant=True)


class SampleBatch(NamedTuple):
    """One rank's part of a global batch, not yet decoded.

    Attributes:
        epoch: epoch of the batch.
        step: range of positions of the global batch.
        positions: `int64[n]`, positions of this rank's samples.
        mask: `bool[n]`, False for padding samples and for samples that the run masks.
        shards: `int64[n]`, index of each sample's shard in the shard table of its split.
        rows: `int64[n]`, row of each sample in its shard's file; deleted samples still have rows in that file.
        blobs: views of the encoded images, `uint8[size]` each; a view keeps the memory map of its shard open. Empty
            if no blob column was requested.
        columns: the other requested columns of fixed width, by name: `dtype[n]`.
        parts: the same samples grouped by shard, for decoders that read columns of variable width.
        sources: `int64[n]`, index of each sample's split in the mixture; zeros for a single split.
        masked: `bool[n]`, True for samples that the run masks, without padding; None: there are none.
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
    masked: npt.NDArray[np.bool_] | None = None

    @property
    def has_padding(self) -> bool:
        """Whether the global batch contains padding samples; this rank's part may have none."""
        return self.step.stop > self.step.num_samples

    def places(self) -> tuple[Integers, Integers, Integers]:
        """Return split, shard and row of each sample, `int64[n]` each; of packs, of each document in their order."""
        pieces = [(part.indices, part.rows) for part in self.parts if part.pieces is not None]
        if not pieces:
            return self.sources, self.shards, self.rows
        indices, rows = (np.concatenate(values) for values in zip(*pieces, strict=True))
        order = np.argsort(indices, kind="stable")  # the documents of a pack are in one part, in their order
        return self.sources[indices[order]], self.shards[indices[order]], rows[order]

    @property
    def sample_shards(self) -> list[Shard]:
        """The shard of each sample, in the order of `positions`."""
        by_index = {index: part.shard for part in self.parts for index in part.indices.tolist()}
        return [by_index[index] for index in range(len(self.positions))]

    @property
    def kept_parts(self) -> Sequence[ShardPart]:
        """The samples that are not masked, grouped by shard; their `indices` are those of this batch."""
        if self.masked is None:
            return self.parts
        return [
            ShardPart(part.shard, part.indices[is_kept], part.rows[is_kept])
            if part.pieces is None
            else part  # packs: the documents that are masked are in `is_masked`
            for part in self.parts
            if (is_kept := ~self.masked[part.indices]).any()
        ]

    def without_masked(self) -> SampleBatch:
        """Return a batch of only the samples that are not masked, to decode."""
        if self.masked is None:
            return self
        kept = np.flatnonzero(~self.masked)
        return self._replace(
            positions=self.positions[kept],
            mask=self.mask[kept],
            shards=self.shards[kept],
            rows=self.rows[kept],
            blobs=[self.blobs[index] for index in kept.tolist()] if self.blobs else [],
            columns={name: values[kept] for name, values in self.columns.items()},
            parts=[part._replace(indices=np.searchsorted(kept, part.indices)) for part in self.kept_parts],
            sources=self.sources[kept],
            masked=None,
        )

    @property
    def before(self) -> Cursor:
        """Cursor of the run before this batch is served."""
        return Cursor(self.epoch, self.step.position)

    @property
    def after(self) -> Cursor:
        """Cursor of the run after this batch is served."""
        return Cursor(self.epoch, self.step.next_position)


class BatchDecoder(Protocol[B_co]):
    """Converts sample batches to the loader's batches, several at a time, in the order in which `feed` gets them."""

    def feed(self, batch: SampleBatch) -> None:
        """Start decoding a batch, which may be empty. Its views of shards stay valid until `take` has returned it."""

    def take(self) -> B_co:
        """Wait for the oldest batch that was fed, and return it decoded.

        Raises:
            BadSampleError: a sample does not decode; the message names it. The caller must then close the decoder.
        """

    def close(self) -> None:
        """Stop, and release all resources."""


class BatchPositions(NamedTuple):
    """Where the samples of a batch are stored; for `sources`, `shards` and `rows`, see `SampleBatch`.

    Attributes:
        positions: `int64[n]`, positions of the samples.
        is_sample: `bool[n]`, False for padding.
        is_masked: `bool[n]`, True for samples that the run masks.
    """

    positions: Integers
    is_sample: npt.NDArray[np.bool_]
    is_masked: npt.NDArray[np.bool_]
    sources: Integers
    shards: Integers
    rows: Integers


class SampleBatches:
    """One rank's endless stream of batches, epoch after epoch, from any cursor.

    Args:
        samples: the split or mixture to read.
        store: shard store to read from; for a mixture, one store per split.
        config: parameters of the access order.
        batch_size: samples of this rank per step.
        rank, world_size, tail: see `DataRanks` and `Loader`.
        blob: column with the encoded images; None: read no blobs.
        columns: other columns of fixed width to read.
        masked: samples to mask; `mask` changes it.

    Raises:
        ConfigError: a split lacks one of the columns, or its column has another type than that of the first split.
            `stream` also raises it, if a column is null for a sample of a batch.
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
        masked: Masked = NOTHING_MASKED,
    ) -> None:
        self.mask(masked)
        stores = store if isinstance(store, Sequence) else [store]
        weighted = weighted_splits(samples)
        labels = label_maps(samples) if LABEL in columns else [None] * len(splits_of(samples))
        self._readers = {
            number: SplitReader(split, stores[number], order, blob=blob, columns=columns, labels=labels[number])
            for number, (split, order) in enumerate(
                zip(splits_of(samples), split_orders(samples, config), strict=True)
            )
            if split in weighted
        }
        self._locator: SplitLocator | MixtureLocator = (
            MixtureLocator(samples.order(config.seed), self._readers)
            if isinstance(samples, Mixture)
            else SplitLocator(self._readers[0], config.lanes)
        )
        self._locate_from = partial(
            locate_epoch, self._locator, batch_size=batch_size, rank=rank, world_size=world_size, tail=tail
        )
        self._blob = blob
        self._types = _common_types(list(self._readers.values()), columns)
        self._needs_values = blob is not None or bool(columns)

    def mask(self, masked: Masked) -> None:
        """Mask these samples, and no others, in the batches that are read from now on."""
        self._masks = BatchMasks(masked)

    def stream(self, cursor: Cursor, picked: Sequence[PickedStep] = ()) -> Iterator[SampleBatch | None]:
        """Yield batches from `cursor` on, without end. An epoch must have a step, otherwise this loops forever.

        A subclass yields None while it does not know the next batch. `picked`: batches before those at the cursor
        after the last of them.
        """
        self._advance(cursor)
        for step in picked:
            part = (step.positions, np.ones(len(step.positions), np.bool_))
            for located in locate_parts(self._locator, cursor.epoch, [step], [part]):
                yield self._read(cursor.epoch, located)
            cursor = Cursor(cursor.epoch, step.next_position)
        while True:
            for located in self._locate_from(cursor.epoch, cursor.position):
                yield self._read(cursor.epoch, located)
            cursor = Cursor(cursor.epoch + 1, 0)

    def read_part(self, cursor: Cursor, rank: int) -> SampleBatch:
        """Return the part of the global batch at a cursor that a data rank serves, of this process or of another.

        Raises:
            ConfigError: the epoch has no batch there.
        """
        self._advance(cursor)
        located = next(self._locate_from(cursor.epoch, cursor.position, rank=rank), None)
        if located is None:
            raise ConfigError(f"no batch begins at position {cursor.position} of epoch {cursor.epoch}")
        return self._read(cursor.epoch, located)

    def _advance(self, cursor: Cursor) -> None:
        for number, split_cursor in self._locator.cursors(cursor).items():
            self._readers[number].advance(split_cursor)

    def find_places(self, cursor: Cursor) -> BatchPositions:
        """Return where the samples of the batch at a cursor are stored; of packs, all documents. No shard is opened.

        Raises:
            ConfigError: the epoch has no batch there.
        """
        located = next(self._locate_from(cursor.epoch, cursor.position), None)
        if located is None:
            raise ConfigError(f"no batch begins at position {cursor.position} of epoch {cursor.epoch}")
        _, positions, mask, locations, by_split = located
        found: list[tuple[Integers, Integers]] = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        places: list[tuple[str, int, Integers, Integers]] = []
        start = 0  # of the samples of a shard among all
        for number, by_shard in by_split.items():
            split = self._readers[number].split
            for shard, indices in by_shard:
                rows = locations.rows[indices]
                if split.packs is not None:
                    index, pieces = split.packs.pieces(shard, rows)
                    # The documents in place of the packs.
                    indices, rows = indices[index], split.stored_rows(shard, pieces.rows)  # noqa: PLW2901
                found.append((indices, rows))
                places.append((split.digest, shard, np.arange(start, start + len(rows)), rows))
                start += len(rows)
        index, rows = (np.concatenate(values) for values in zip(*found, strict=True))
        is_masked = self._masks.find(cursor.epoch, positions[index], places) & mask[index]
        order = np.argsort(index, kind="stable")
        at = index[order]
        sources, shards = locations.sources[at], locations.shards[at]
        return BatchPositions(positions[at], mask[at], is_masked[order], sources, shards, rows[order])

    def retire(self, batch: SampleBatch) -> None:
        """Record that `batch` and all earlier ones are handed over; release the shards that no later batch needs."""
        for number, split_cursor in self._locator.cursors(batch.after).items():
            self._readers[number].retire(split_cursor, batch.before)

    def close(self) -> None:
        """Release all shards; a new `stream` opens them again."""
        for reader in self._readers.values():
            reader.close()

    def describe(self, batch: SampleBatch, index: int) -> str:
        """Return the name of one sample for messages: split, shard and key."""
        reader = self._readers[int(batch.sources[index])]
        shard, opened = int(batch.shards[index]), batch.sample_shards[index]
        rows = [part.rows[part.indices == index] for part in batch.parts if part.pieces is not None]
        if rows:  # of a pack: any of its documents may be meant
            return " + ".join(reader.describe(shard, row, opened) for row in np.concatenate(rows).tolist())
        return reader.describe(shard, int(batch.rows[index]), opened)

    def _read(self, epoch: int, located: LocatedStep) -> SampleBatch:
        """Open the shards of a step, and return views of its samples."""
        step, positions, mask, locations, by_split = located
        # Add references before opening: a shard that is opened without a reference stays open until `close`.
        self._reference_shards(epoch, located)
        blobs: list[Any] = [] if self._blob is None else [None] * len(positions)
        columns = {name: np.empty(len(positions), kind) for name, kind in self._types.items()}
        parts: list[ShardPart] = []
        places: list[tuple[str, int, Integers, Integers]] = []  # what `BatchMasks.find` needs
        for number, by_shard in by_split.items():
            reader = self._readers[number]
            opened = reader.open(by_shard, locations.rows)
            if reader.split.packs is not None:
                self._mask_pieces(epoch, positions, reader.split.digest, by_shard, opened)
            parts += opened
            if self._masks.masked and reader.split.packs is None:
                places += [
                    (reader.split.digest, shard, part.indices, part.rows)
                    for (shard, _), part in zip(by_shard, opened, strict=True)
                ]
            if not self._needs_values:
                continue
            for part in opened:
                if self._blob is not None:
                    views = part.shard.blobs(self._blob, part.rows)
                    for index, view in zip(part.indices.tolist(), views, strict=True):
                        blobs[index] = view
                for name, values in columns.items():
                    values[part.indices] = reader.values(part, name)
        is_masked = np.zeros(len(positions), np.bool_)
        if self._masks.masked:
            is_masked = self._masks.find(epoch, positions, places)
        for part in parts:
            if part.pieces is not None:
                is_masked[part.indices] = True
                is_masked[part.indices[~part.pieces.is_masked]] = False
            elif len(part.shard.redacted):  # purged samples
                is_masked[part.indices] |= np.isin(part.rows, part.shard.redacted)
        is_masked &= mask
        masked = is_masked if is_masked.any() else None
        return SampleBatch(
            epoch,
            step,
            positions,
            mask if masked is None else mask & ~masked,
            locations.shards,
            locations.rows,
            blobs,
            columns,
            parts,
            locations.sources,
            masked,
        )

    def _mask_pieces(
        self,
        epoch: int,
        positions: Integers,
        table: str,
        by_shard: Sequence[tuple[int, Integers]],
        parts: Sequence[ShardPart],
    ) -> None:
        """Write which documents of packs are masked or purged to the pieces of the parts of a split."""
        for (shard, _), part in zip(by_shard, parts, strict=True):
            assert part.pieces is not None
            if self._masks.masked:
                places = [(table, shard, np.arange(len(part.rows)), part.rows)]
                part.pieces.is_masked[:] = self._masks.find(epoch, positions[part.indices], places)
            if len(part.shard.redacted):
                part.pieces.is_masked[:] |= np.isin(part.rows, part.shard.redacted)

    def _reference_shards(self, epoch: int, located: LocatedStep) -> None:
        """Add references to all shards that the batch needs, so that they stay open until the batch is retired."""
        start = Cursor(epoch, located.step.start)
        cursors_before = self._locator.cursors(start)
        cursors_after = self._locator.cursors(Cursor(epoch, min(located.step.stop, located.step.num_samples)))
        has_padding = located.step.stop > located.step.num_samples
        locations = located.locations
        for number, reader in self._readers.items():
            before, after = cursors_before[number], cursors_after[number]
            reader.reference_range(before, after)
            # `reference_range` skips padding samples. It also skips epochs of a split that begin and end inside this
            # batch, which happens in a mixture with a small split. The shards of these samples get references here.
            if has_padding or after.epoch > before.epoch + 1:
                is_inside = (locations.epochs > before.epoch) & (locations.epochs < after.epoch)
                is_skipped = (locations.sources == number) & (is_inside | ~located.mask)
                reader.reference_shards(np.unique(locations.shards[is_skipped]).tolist(), start)


def _common_types(readers: Sequence[SplitReader], columns: Sequence[str]) -> dict[str, npt.DTypeLike]:
    """Return the dtype of each column. Raises ConfigError: two splits have a column with different dtypes."""
    first = readers[0]
    for reader in readers[1:]:
        for name in columns:
            dtype, first_dtype = np.dtype(reader.dtype(name)).name, np.dtype(first.dtype(name)).name
            if dtype != first_dtype:
                raise ConfigError(
                    f"column {name!r} is {dtype} in {name_of(reader.split)} and {first_dtype} in "
                    f"{name_of(first.split)}; a mixture needs one type: ingest both with the same one"
                )
    return {name: first.dtype(name) for name in columns}


def read_lists(batch: SampleBatch, columns: Sequence[str]) -> dict[str, list[Any]]:
    """Return columns of a batch as lists of Python values.

    A value is None if it is null, or if its shard lacks the column, which other shards of the split have.

    Raises:
        CorruptDataError: a text is not UTF-8.
    """
    lists: dict[str, list[Any]] = {name: [None] * len(batch.positions) for name in columns}
    for part in batch.parts:
        for name, values in lists.items():
            for index, value in zip(part.indices.tolist(), part.shard.items(name, part.rows), strict=True):
                values[index] = value
    return lists
