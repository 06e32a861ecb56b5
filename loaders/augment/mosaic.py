"""Mosaics of four training images, as pure functions of (seed, epoch, position).

Positions are in groups of four, 0..3, 4..7 and so on, which a batch has whole. So a mosaic reads no other samples,
and is equal at any batch size and number of ranks. Source: Bochkovskiy et al. 2020. As there, the four images form
one of twice the size, of which a random part of the size of one image is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from datasvc.errors import ConfigError
from datasvc.keyed_random import Integers
from datasvc.loaders.augment.augment import MOSAIC_STREAMS, draw
from datasvc.loaders.augment.objects import View
from datasvc.order import Tail, lanes_of_rank

GROUP: Final = 4
"""Number of images of a mosaic, and of consecutive positions that are in each other's mosaics."""
_SEQUENCES: Final = np.array(list(permutations(range(GROUP))), np.int64)
_LEAST, _MOST = 0.25, 0.75  # of the side: where the four images meet


class Tile(NamedTuple):
    """A part of a mosaic: `rows` and `columns` of the output, and those of the image `source` of the batch."""

    source: int
    rows: slice
    columns: slice
    source_rows: slice
    source_columns: slice

    def view(self, view: View) -> View:
        """Return what the tile shows of its image, whose output as a whole shows `view`."""
        width, height = view.shown
        shown = (self.columns.stop - self.columns.start, self.rows.stop - self.rows.start)
        if shown == view.shown:
            return view
        left, right = self.source_columns.start, self.source_columns.stop
        across = np.array([width - right, width - left] if view.flip else [left, right]) / width
        down = np.array([self.source_rows.start, self.source_rows.stop]) / height
        x, y, *stop = view.region
        xs, ys = x + across * (stop[0] - x), y + down * (stop[1] - y)
        return replace(view, region=np.array([xs[0], ys[0], xs[1], ys[1]]), shown=shown)


@dataclass(frozen=True)
class Mosaics:
    """Which images of a batch make each of its outputs.

    Attributes:
        sources: `int64[n, 4]`, indices in the batch: top left, top right, bottom left, bottom right.
        centres: `int64[n, 2]`, x and y where the four meet, in pixels of the output; the side of the output, twice,
            for an output that shows only the first one, its own sample.
        size: side of the output in pixels.
    """

    sources: Integers
    centres: Integers
    size: int

    def without(self, indices: list[int]) -> Mosaics:
        """Return the mosaics without those of some samples of the batch, which show only themselves."""
        sources, centres = self.sources.copy(), self.centres.copy()
        sources[indices], centres[indices] = np.array(indices, np.int64)[:, None], self.size
        return Mosaics(sources, centres, self.size)

    def tiles(self, index: int) -> Iterator[Tile]:
        """Yield the tiles of an output of the batch that have an area."""
        size, (x, y) = self.size, self.centres[index].tolist()
        # Each image touches the centre with its corner, so what is cut off of it is at the edge of the output.
        columns = ((slice(0, x), slice(size - x, size)), (slice(x, size), slice(0, size - x)))
        rows = ((slice(0, y), slice(size - y, size)), (slice(y, size), slice(0, size - y)))
        for number, source in enumerate(self.sources[index].tolist()):
            down, across = rows[number // 2], columns[number % 2]
            if down[0].stop > down[0].start and across[0].stop > across[0].start:
                yield Tile(source, down[0], across[0], down[1], across[1])

    def compose(self, images: Any, *, channels_first: bool = False) -> None:
        """Replace a batch's images or masks, a tensor or an array, by their mosaics in place."""
        if channels_first:
            for channel in range(images.shape[1]):
                self.compose(images[:, channel])
            return
        groups: dict[tuple[int, ...], list[int]] = {}
        for index in np.flatnonzero((self.centres < self.size).any(axis=1)).tolist():
            groups.setdefault(tuple(np.unique(self.sources[index]).tolist()), []).append(index)
        for members, outputs in groups.items():
            # Copy a channel of a group at a time: new memory for a whole batch takes longer than the mosaics.
            copied = dict(zip(members, images[list(members)], strict=True))
            for index in outputs:
                for tile in self.tiles(index):
                    shown = copied[tile.source][tile.source_rows, tile.source_columns]
                    images[index, tile.rows, tile.columns] = shown


def check_groups(*, batch_size: int, world_size: int, lanes: int, tail: Tail) -> None:
    """Raise ConfigError if the batches of a rank do not consist of whole groups."""
    of_rank = lanes_of_rank(batch_size * world_size, rank=0, world_size=world_size, lanes=lanes)
    if batch_size % GROUP:
        raise ConfigError(f"batch_size is {batch_size}; a mosaic needs a multiple of {GROUP}")
    if world_size > 1 and of_rank is not None and len(of_rank) % GROUP:  # one rank has all lanes
        raise ConfigError(
            f"the order has {lanes} lanes on {world_size} ranks, which divides the groups of a mosaic: give "
            f"order=OrderConfig(lanes=...) with a multiple of {GROUP * world_size}, or shuffle='global'"
        )
    if tail == "short" and world_size > 1:
        raise ConfigError("tail is 'short', which divides the groups of a mosaic: give 'drop' or 'pad'")


def plan_mosaics(
    positions: Integers,
    is_sample: npt.NDArray[np.bool_],
    num_samples: int,
    *,
    seed: int,
    epoch: int,
    size: int,
    probability: float,
) -> Mosaics:
    """Draw the mosaic of each sample of a batch; padding has none.

    Args:
        positions: positions of the samples in the epoch, `int64[n]`.
        is_sample: `bool[n]`, False for padding.
        num_samples: samples of the epoch.
        seed: seed of the access order.
        epoch: epoch of the access order.
        size: side of the output in pixels.
        probability: probability of a mosaic.

    Raises:
        ConfigError: the batch has only a part of a group.
    """
    chance, sequence, *centre = (draw(stream, positions, seed=seed, epoch=epoch) for stream in MOSAIC_STREAMS)
    indices = {position: index for index, position in enumerate(positions.tolist()) if is_sample[index]}
    meeting = np.rint((_LEAST + (_MOST - _LEAST) * np.stack(centre, axis=1)) * size).astype(np.int64)
    groups, counts = np.unique(positions[is_sample] // GROUP, return_counts=True)
    divided = groups[counts < np.minimum(GROUP, num_samples - groups * GROUP)] * GROUP
    # Checked for all groups: otherwise a run with few mosaics would continue, and stop at the first one.
    if probability and len(divided):
        raise ConfigError(
            f"a batch has only a part of the positions {divided[0]}..{divided[0] + GROUP - 1}, which make a mosaic: "
            f"continue at a position that is a multiple of {GROUP}, with batches of whole groups"
        )
    sources, chosen = np.tile(np.arange(len(positions)), (GROUP, 1)).T, (chance < probability) & is_sample
    for index in np.flatnonzero(chosen).tolist():
        first = int(positions[index]) // GROUP * GROUP
        group = [indices[position] for position in range(first, min(first + GROUP, num_samples))]
        order = _SEQUENCES[int(sequence[index] * len(_SEQUENCES))]
        sources[index] = np.array(group)[order % len(group)]  # the last group of an epoch may be smaller
    return Mosaics(sources, np.where(chosen[:, None], meeting, size), size)
