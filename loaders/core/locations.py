"""Locates the samples of one rank's steps: split, shard and row of each, grouped by shard. No shard is opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from datasvc.keyed_random import Integers
from datasvc.loaders.core.split_reader import Cursor, SplitReader
from datasvc.mix_order import MixOrder
from datasvc.order import Step, Tail, plan_step, slice_step

_MAX_CACHED_CURSORS: Final = 64
# Samples per call: enough to make the fixed cost small, but not so many that the first batch is delayed.
_SAMPLES_PER_CALL: Final = 16_384


class SampleLocations(NamedTuple):
    """Locations of samples.

    Attributes:
        sources: `int64[n]`, index of each sample's split.
        epochs: `int64[n]`, epoch of each sample in the access order of its split.
        shards: `int64[n]`, index of the shard in the split's shard table.
        rows: `int64[n]`, row in the shard's file, which has the deleted samples too; of packs, their numbers.
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


class SplitLocator:
    """A `SampleLocator` of one split: its positions are those of the split's access order."""

    def __init__(self, reader: SplitReader, lanes: int) -> None:
        self._reader = reader
        self.num_samples = reader.split.num_positions
        self.lanes = lanes

    def cursors(self, cursor: Cursor) -> Mapping[int, Cursor]:
        """Return the cursor of the split's order, by the index 0."""
        return {0: cursor}

    def locate(self, epoch: int, positions: Integers) -> SampleLocations:
        """Return the locations of positions, see `SampleLocator`."""
        shards, rows = self._reader.locate(epoch, positions)
        return SampleLocations(np.zeros_like(positions), np.full_like(positions, epoch), shards, rows)


class MixtureLocator:
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
        """Return the locations of positions, see `SampleLocator`."""
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
        yield from locate_steps(locator, epoch, steps, rank=rank, world_size=world_size)


def locate_steps(
    locator: SampleLocator, epoch: int, steps: Sequence[Step], *, rank: int, world_size: int
) -> Iterator[LocatedStep]:
    """Yield one rank's part of each of several consecutive steps. A single call locates the samples of all steps."""
    return locate_parts(
        locator, epoch, steps, _slice_all(steps, rank=rank, world_size=world_size, lanes=locator.lanes)
    )


def locate_parts(
    locator: SampleLocator, epoch: int, steps: Sequence[Step], parts: Sequence[tuple[Integers, npt.NDArray[np.bool_]]]
) -> Iterator[LocatedStep]:
    """Yield given parts of steps: positions, and a mask that is False for padding. See `locate_steps`."""
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
