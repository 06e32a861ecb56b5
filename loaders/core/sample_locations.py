"""Where the samples of the next steps lie: found for many steps at once, since a call costs more than a sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from datasvc.keyed_random import Integers
from datasvc.order import Step, Tail, plan_step, slice_step

# Samples of one call: enough that its own cost is small beside theirs, few enough to delay no first batch.
_RUN: Final = 4096


class SampleLocations(NamedTuple):
    """Where samples lie.

    Attributes:
        sources: `int64[n]`, numbers of their splits.
        epochs: `int64[n]`, of these splits' own orders.
        shards: `int64[n]`, numbers of their shards in the splits' shard tables.
        rows: `int64[n]`, rows there, deleted samples left out.
    """

    sources: Integers
    epochs: Integers
    shards: Integers
    rows: Integers


class SampleLocator(Protocol):
    """Knows where the sample of each position of an epoch lies.

    Attributes:
        num_samples: of an epoch.
        lanes: of its order, see `slice_step`.
    """

    num_samples: int
    lanes: int

    def locate(self, epoch: int, positions: Integers) -> SampleLocations:
        """Return where positions lie: `int64[n]` in range(num_samples), in any order."""


class LocatedStep(NamedTuple):
    """One rank's part of a step.

    Attributes:
        step: positions of the global batch.
        positions: `int64[n]`, of this rank's samples.
        mask: `bool[n]`, False for samples that only pad.
        located: where they lie.
        by_shard: of each split its shards, each with the indexes of its samples, `int64[k]` ascending.
    """

    step: Step
    positions: Integers
    mask: npt.NDArray[np.bool_]
    located: SampleLocations
    by_shard: Mapping[int, list[tuple[int, Integers]]]


def locate_epoch(
    locator: SampleLocator, epoch: int, position: int, *, batch_size: int, rank: int, world_size: int, tail: Tail
) -> Iterator[LocatedStep]:
    """Yield one rank's part of each step from `position` to the end of the epoch; nothing where none is left."""
    num_at_once = max(1, _RUN // batch_size)
    while True:
        steps: list[Step] = []
        while len(steps) < num_at_once:
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
    parts = _slice_all(steps, rank=rank, world_size=world_size, lanes=locator.lanes)
    stops = np.cumsum([len(positions) for positions, _ in parts])
    starts = stops - [len(positions) for positions, _ in parts]
    found = locator.locate(epoch, np.concatenate([positions for positions, _ in parts]))
    groups = _group_by_shard(np.repeat(np.arange(len(steps)), stops - starts), found, starts)
    bounds = zip(starts.tolist(), stops.tolist(), strict=True)
    for step, (positions, mask), (start, stop), group in zip(steps, parts, bounds, groups, strict=True):
        own = SampleLocations(*[values[start:stop] for values in found])
        yield LocatedStep(step, positions, mask, own, group)


def _slice_all(
    steps: Sequence[Step], *, rank: int, world_size: int, lanes: int
) -> list[tuple[Integers, npt.NDArray[np.bool_]]]:
    """Return what `slice_step` does for each of consecutive steps: a whole one is the one before, moved on."""
    first, size = steps[0], steps[0].stop - steps[0].start
    whole = [step for step in steps if step.stop <= step.num_samples and step.stop - step.start == size]
    moved = np.array([step.start - first.start for step in whole], np.int64)
    positions, _ = slice_step(first, rank=rank, world_size=world_size, lanes=lanes)
    every = moved[:, None] + positions
    rest = [slice_step(step, rank=rank, world_size=world_size, lanes=lanes) for step in steps[len(whole) :]]
    return [*zip(every, np.ones(every.shape, np.bool_), strict=True), *rest]


def _group_by_shard(
    steps: Integers, found: SampleLocations, starts: Integers
) -> list[dict[int, list[tuple[int, Integers]]]]:
    """Return, for each step and each of its splits, the shards with the indexes of their samples.

    Args:
        steps: `int64[n]`, number of each sample's step.
        found: where it lies.
        starts: `int64[steps]`, where each step's samples begin.
    """
    groups: list[dict[int, list[tuple[int, Integers]]]] = [{} for _ in starts]
    by_shard = np.lexsort((found.shards, found.sources, steps))
    step_of, source_of, shard_of = steps[by_shard], found.sources[by_shard], found.shards[by_shard]
    indices = by_shard - starts[step_of]
    cuts = np.flatnonzero((np.diff(step_of) != 0) | (np.diff(source_of) != 0) | (np.diff(shard_of) != 0)) + 1
    bounds = [0, *cuts.tolist(), len(by_shard)] if len(by_shard) else []
    firsts = bounds[:-1]
    keys = zip(step_of[firsts].tolist(), source_of[firsts].tolist(), shard_of[firsts].tolist(), strict=True)
    for (step, source, shard), (start, stop) in zip(keys, pairwise(bounds), strict=True):
        groups[step].setdefault(source, []).append((shard, indices[start:stop]))
    return groups
