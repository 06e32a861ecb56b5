"""Reads one rank's samples in the access order, as batches of zero-copy views of shards, for the loaders to decode.

A shard is opened for the first batch that needs it, and released after the last batch that needs it is handed
over to the caller. So a loader holds no more shards of a cache than its access order needs at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.loaders.core.mixture import Mixture, label_maps, name_of, split_orders, splits_of, weighted_splits
from datasvc.loaders.core.split_reader import Cursor, ShardPart, SplitReader
from datasvc.mix_order import MixOrder
from datasvc.order import OrderConfig, Step, Tail, plan_step, slice_step
from datasvc.shards import Shard, ShardStore, Split
from datasvc.shards.format.mapped_file import Bytes
from datasvc.shards.format.schema import LABEL

__all__ = ["Cursor", "SampleBatch", "SampleBatches", "ShardPart"]

_MAX_CACHED_CURSORS: Final = 64


# Samples per call: enough to make the fixed cost small, but not so many that the first batch is delayed.
_SAMPLES_PER_CALL: Final = 4096


class SampleBatch(NamedTuple):
    """One rank's part of a global batch, not yet decoded.

    Attributes:
        epoch: epoch of the batch.
        step: range of positions of the global batch.
        positions: `int64[n]`, positions of this rank's samples.
        mask: `bool[n]`, False for padding samples.
        shards: `int64[n]`, index of each sample's shard in the shard table of its split.
        rows: `int64[n]`, row of each sample in its shard's file; deleted samples still have rows in that file.
        blobs: views of the encoded images, `uint8[size]` each; a view keeps the memory map of its shard open. Empty
            if no blob column was requested.
        columns: the other requested columns of fixed width, by name: `dtype[n]`.
        parts: the same samples grouped by shard, for decoders that read columns of variable width.
        sources: `int64[n]`, index of each sample's split in the mixture; zeros for a single split.
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
    def has_padding(self) -> bool:
        """Whether the global batch contains padding samples; this rank's part may have none."""
        return self.step.stop > self.step.num_samples

    @property
    def sample_shards(self) -> list[Shard]:
        """The shard of each sample, in the order of `positions`."""
        by_index = {index: part.shard for part in self.parts for index in part.indices.tolist()}
        return [by_index[index] for index in range(len(self.positions))]

    @property
    def before(self) -> Cursor:
        """Cursor of the run before this batch is served."""
        return Cursor(self.epoch, self.step.start)

    @property
    def after(self) -> Cursor:
        """Cursor of the run after this batch is served."""
        return Cursor(self.epoch, self.step.next_position)


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
    ) -> None:
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
        self._locator: _SplitLocator | _MixtureLocator = (
            _MixtureLocator(samples.order(config.seed), self._readers)
            if isinstance(samples, Mixture)
            else _SplitLocator(self._readers[0], config.lanes)
        )
        self._locate_from = partial(
            locate_epoch, self._locator, batch_size=batch_size, rank=rank, world_size=world_size, tail=tail
        )
        self._blob = blob
        self._types = _common_types(list(self._readers.values()), columns)
        self._needs_values = blob is not None or bool(columns)

    def stream(self, cursor: Cursor) -> Iterator[SampleBatch]:
        """Yield batches from `cursor` on, without end. An epoch must have a step, else this loops for ever."""
        for number, split_cursor in self._locator.cursors(cursor).items():
            self._readers[number].advance(split_cursor)
        while True:
            for located in self._locate_from(cursor.epoch, cursor.position):
                yield self._read(cursor.epoch, located)
            cursor = Cursor(cursor.epoch + 1, 0)

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
        return reader.describe(int(batch.shards[index]), int(batch.rows[index]), batch.sample_shards[index])

    def _read(self, epoch: int, located: LocatedStep) -> SampleBatch:
        """Open the shards of a step, and return views of its samples."""
        step, positions, mask, locations, by_split = located
        # Add references before opening: a shard that is opened without a reference stays open until `close`.
        self._reference_shards(epoch, located)
        blobs: list[Any] = [] if self._blob is None else [None] * len(positions)
        columns = {name: np.empty(len(positions), kind) for name, kind in self._types.items()}
        parts: list[ShardPart] = []
        for number, by_shard in by_split.items():
            reader = self._readers[number]
            opened = reader.open(by_shard, locations.rows)
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
            epoch, step, positions, mask, locations.shards, locations.rows, blobs, columns, parts, locations.sources
        )

    def _reference_shards(self, epoch: int, located: LocatedStep) -> None:
        """Add references to all shards that the batch needs, so that they stay open until the batch is retired."""
        start = Cursor(epoch, located.step.start)
        cursors_before = self._locator.cursors(start)
        cursors_after = self._locator.cursors(Cursor(epoch, located.step.next_position))
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


class _SplitLocator:
    """A `SampleLocator` of one split: its positions are those of the split's access order."""

    def __init__(self, reader: SplitReader, lanes: int) -> None:
        self._reader = reader
        self.num_samples = len(reader.split)
        self.lanes = lanes

    def cursors(self, cursor: Cursor) -> Mapping[int, Cursor]:
        return {0: cursor}

    def locate(self, epoch: int, positions: Integers) -> SampleLocations:
        shards, rows = self._reader.locate(epoch, positions)
        return SampleLocations(np.zeros_like(positions), np.full_like(positions, epoch), shards, rows)


class _MixtureLocator:
    """A `SampleLocator` of a mixture: it assigns positions to splits, and each split has its own order and epochs."""

    # Not the lanes of the splits' orders: a position of the mixture belongs to no fixed lane.
    lanes = 1

    def __init__(self, order: MixOrder, readers: Mapping[int, SplitReader]) -> None:
        self._order = order
        self._readers = readers
        self.num_samples = order.num_samples
        self._cached_cursors: dict[Cursor, Mapping[int, Cursor]] = {}

    def cursors(self, cursor: Cursor) -> Mapping[int, Cursor]:
        """Return the cursor of each split's order at a cursor of the mixture."""
        # Cached, because each cursor is needed three times: at the end of a batch, at the start of the next, and when
        # the batch is retired. Most cursors in a full cache are not needed again, so it is emptied.
        if cursor not in self._cached_cursors:
            if len(self._cached_cursors) >= _MAX_CACHED_CURSORS:
                self._cached_cursors.clear()
            cursors = self._order.cursors(cursor.epoch, cursor.position)
            self._cached_cursors[cursor] = {number: Cursor(*cursors[number]) for number in self._readers}
        return self._cached_cursors[cursor]

    def locate(self, epoch: int, positions: Integers) -> SampleLocations:
        assigned = self._order.locate(epoch, positions)
        shards, rows = np.empty_like(positions), np.empty_like(positions)
        # One call per split and epoch, because each call has a high fixed cost: sort the samples by split and epoch,
        # and cut where one of them changes.
        sorted_indices = np.lexsort((assigned.epochs, assigned.sources))
        sources, epochs = assigned.sources[sorted_indices], assigned.epochs[sorted_indices]
        cuts = np.flatnonzero((np.diff(sources) != 0) | (np.diff(epochs) != 0)) + 1
        for group in np.split(sorted_indices, cuts) if len(positions) else []:
            source, split_epoch = int(assigned.sources[group[0]]), int(assigned.epochs[group[0]])
            shards[group], rows[group] = self._readers[source].locate(split_epoch, assigned.positions[group])
        return SampleLocations(assigned.sources, assigned.epochs, shards, rows)


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


# `SampleBatches` reads the samples at these locations.


class SampleLocations(NamedTuple):
    """Locations of samples.

    Attributes:
        sources: `int64[n]`, index of each sample's split.
        epochs: `int64[n]`, epoch of each sample in the access order of its split.
        shards: `int64[n]`, index of the shard in the split's shard table.
        rows: `int64[n]`, row in the shard, not counting deleted samples.
    """

    sources: Integers
    epochs: Integers
    shards: Integers
    rows: Integers


class SampleLocator(Protocol):
    """Maps positions of an epoch to sample locations.

    Attributes:
        num_samples: samples of an epoch.
        lanes: number of lanes of the order, see `slice_step`.
    """

    num_samples: int
    lanes: int

    def locate(self, epoch: int, positions: Integers) -> SampleLocations:
        """Return the locations of `positions`, `int64[n]` in range(num_samples), in any order."""


class LocatedStep(NamedTuple):
    """One rank's part of a step.

    Attributes:
        step: positions of the global batch.
        positions: `int64[n]`, positions of this rank's samples.
        mask: `bool[n]`, False for padding samples.
        locations: locations of this rank's samples.
        by_split: index of a split -> (shard, `int64[k]` ascending: indices of its samples in this rank's batch).
    """

    step: Step
    positions: Integers
    mask: npt.NDArray[np.bool_]
    locations: SampleLocations
    by_split: Mapping[int, list[tuple[int, Integers]]]


def locate_epoch(
    locator: SampleLocator, epoch: int, position: int, *, batch_size: int, rank: int, world_size: int, tail: Tail
) -> Iterator[LocatedStep]:
    """Yield one rank's part of each step from `position` to the end of the epoch."""
    steps_per_call = max(1, _SAMPLES_PER_CALL // batch_size)
    while True:
        steps: list[Step] = []
        while len(steps) < steps_per_call:
            step = plan_step(position, locator.num_samples, batch_size * world_size, tail)
            if step is None:
                break
            steps.append(step)
            position = step.next_position
        if not steps:
            return
        yield from _locate(locator, epoch, steps, rank=rank, world_size=world_size)


def _locate(
    locator: SampleLocator, epoch: int, steps: Sequence[Step], *, rank: int, world_size: int
) -> Iterator[LocatedStep]:
    """Yield one rank's part of each of several consecutive steps. A single call locates the samples of all steps."""
    parts = _slice_all(steps, rank=rank, world_size=world_size, lanes=locator.lanes)
    sizes = np.array([len(positions) for positions, _ in parts], np.int64)
    stops = np.cumsum(sizes)
    starts = stops - sizes
    located = locator.locate(epoch, np.concatenate([positions for positions, _ in parts]))
    groups = _group_by_shard(np.repeat(np.arange(len(steps)), sizes), located, starts)
    bounds = zip(starts.tolist(), stops.tolist(), strict=True)
    for step, (positions, mask), (start, stop), group in zip(steps, parts, bounds, groups, strict=True):
        locations = SampleLocations(*[values[start:stop] for values in located])
        yield LocatedStep(step, positions, mask, locations, group)


def _slice_all(
    steps: Sequence[Step], *, rank: int, world_size: int, lanes: int
) -> list[tuple[Integers, npt.NDArray[np.bool_]]]:
    """Return this rank's positions and mask in each of several consecutive steps, as `slice_step` does for one."""
    first, size = steps[0], steps[0].stop - steps[0].start
    # Only the last step of an epoch may be short or padded, so all full steps come first.
    full_steps = [step for step in steps if step.stop <= step.num_samples and step.stop - step.start == size]
    # The positions of a full step are those of the first step plus an offset: one addition replaces a call per step.
    offsets = np.array([step.start - first.start for step in full_steps], np.int64)
    positions, _ = slice_step(first, rank=rank, world_size=world_size, lanes=lanes)
    full_positions = offsets[:, None] + positions
    others = [slice_step(step, rank=rank, world_size=world_size, lanes=lanes) for step in steps[len(full_steps) :]]
    return [*zip(full_positions, np.ones(full_positions.shape, np.bool_), strict=True), *others]


def _group_by_shard(
    step_indices: Integers, locations: SampleLocations, starts: Integers
) -> list[dict[int, list[tuple[int, Integers]]]]:
    """Return, for each step and each of its splits, the shards with the indices of their samples in the batch.

    Args:
        step_indices: `int64[n]`, index of each sample's step.
        locations: location of each sample.
        starts: `int64[steps]`, index of each step's first sample.
    """
    # Sort all samples once, and cut where step, split or shard changes: a loop over the samples would take longer.
    groups: list[dict[int, list[tuple[int, Integers]]]] = [{} for _ in starts]
    order = np.lexsort((locations.shards, locations.sources, step_indices))
    steps, sources, shards = step_indices[order], locations.sources[order], locations.shards[order]
    indices = order - starts[steps]  # index of each sample in its batch
    cuts = np.flatnonzero((np.diff(steps) != 0) | (np.diff(sources) != 0) | (np.diff(shards) != 0)) + 1
    bounds = [0, *cuts.tolist(), len(order)] if len(order) else []
    firsts = bounds[:-1]
    keys = zip(steps[firsts].tolist(), sources[firsts].tolist(), shards[firsts].tolist(), strict=True)
    for (step, source, shard), (start, stop) in zip(keys, pairwise(bounds), strict=True):
        groups[step].setdefault(source, []).append((shard, indices[start:stop]))
    return groups
