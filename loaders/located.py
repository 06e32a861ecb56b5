"""Where the samples of the next steps lie: found for many steps at once, since a call costs more than a sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from datasvc.keyed import Integers
from datasvc.order import Step, Tail, plan_step, slice_step

# Samples of one call: enough that its own cost is small beside theirs, few enough to delay no first batch.
_RUN: Final = 4096


class Located(NamedTuple):
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


class Locator(Protocol):
    """Knows where the sample of each position of an epoch lies.

    Attributes:
        num_samples: of an epoch.
        lanes: of its order, see `slice_step`.
    """

    num_samples: int
    lanes: int

    def locate(self, epoch: int, positions: Integers) -> Located:
        """Return where positions lie: `int64[n]` in range(num_samples), in any order."""


@dataclass(frozen=True)
class LocatedStep:
    """One rank's part of a step.

    Attributes:
        step: positions of the global batch.
        positions: `int64[n]`, of this rank's samples.
        mask: `bool[n]`, False for samples that only pad.
        located: where they lie.
        by_shard: split and shard of these, each with the indexes of its samples, `int64[k]` ascending; by split.
    """

    step: Step
    positions: Integers
    mask: npt.NDArray[np.bool_]
    located: Located
    by_shard: list[tuple[int, int, Integers]]


def locate_epoch(
    locator: Locator, epoch: int, position: int, *, batch_size: int, rank: int, world_size: int, tail: Tail
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
    locator: Locator, epoch: int, steps: Sequence[Step], *, rank: int, world_size: int
) -> Iterator[LocatedStep]:
    parts = [slice_step(step, rank=rank, world_size=world_size, lanes=locator.lanes) for step in steps]
    stops = np.cumsum([len(positions) for positions, _ in parts])
    starts = stops - [len(positions) for positions, _ in parts]
    found = locator.locate(epoch, np.concatenate([positions for positions, _ in parts]))
    groups = _group_by_shard(np.repeat(np.arange(len(steps)), stops - starts), found, starts)
    for number, (step, (positions, mask)) in enumerate(zip(steps, parts, strict=True)):
        own = slice(int(starts[number]), int(stops[number]))
        yield LocatedStep(step, positions, mask, Located(*(values[own] for values in found)), groups[number])


def _group_by_shard(steps: Integers, found: Located, starts: Integers) -> list[list[tuple[int, int, Integers]]]:
    """Return, for each step, its splits and shards with the indexes of their samples.

    Args:
        steps: `int64[n]`, number of each sample's step.
        found: where it lies.
        starts: `int64[steps]`, where each step's samples begin.
    """
    groups: list[list[tuple[int, int, Integers]]] = [[] for _ in starts]
    by_shard = np.lexsort((found.shards, found.sources, steps))
    step_of, source_of, shard_of = steps[by_shard], found.sources[by_shard], found.shards[by_shard]
    indices = by_shard - starts[step_of]
    cuts = np.flatnonzero((np.diff(step_of) != 0) | (np.diff(source_of) != 0) | (np.diff(shard_of) != 0)) + 1
    bounds = [0, *cuts.tolist(), len(by_shard)] if len(by_shard) else []
    for start, stop in pairwise(bounds):
        groups[step_of[start]].append((int(source_of[start]), int(shard_of[start]), indices[start:stop]))
    return groups
