"""Groups of images of a similar aspect, and the access order whose positions come in such groups.

The positions of an order are divided into blocks of 32 groups; the last block has the rest too, so it has up to 64.
Each epoch sorts the samples of a block by their aspect, cuts them into groups, and permutes the groups. So each
position still has one sample, and a sample moves inside its block only: the shards in use stay about the same.
The size of a group belongs to the view and not to a loader, so the order depends on no batch size or world size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from datasvc.keyed_random import Integers, KeyedPermutation, derive_keys, uniform
from datasvc.order import AccessOrder, ShardWindows
from datasvc.repository import Objects
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.format.view_table import GROUPS_PER_BLOCK, Grouping
from datasvc.shards.packing.pack_objects import PackReader
from datasvc.shards.packing.row_cache import RowCache, RowMap

_GROUPS: Final = 5  # value of `purpose` for `derive_keys`; the order uses 1 to 4
_STEPS: Final = 32  # codes of aspects between 1:1 and 2:1
_SQUARE, _MAX_CODE = 128, 255
_MAX_ROWS: Final = 8 << 20  # whose aspects are in memory
_POSITIONS_AT_ONCE: Final = 1 << 16


def encode_aspects(widths: Integers, heights: Integers) -> Integers:
    """Return a number from 0 (tallest) to 255 (widest) for the aspect of each image; 128 for a square and 0 x 0."""
    # Only integers: all machines compute the same numbers, so equal views have equal digests.
    shorter, longer = np.maximum(np.minimum(widths, heights), 1), np.maximum(widths, heights)
    steps = np.minimum((longer - shorter).clip(0) * _STEPS // shorter, _MAX_CODE - _SQUARE)
    codes: Integers = np.where(widths >= heights, _SQUARE + steps, _SQUARE - 1 - steps)
    return codes


class Aspects:
    """The aspects of the live samples of a grouped table. Safe for use by several threads.

    Args:
        objects: objects of the repository.
        table: the table.
        grouping: its grouping.
    """

    def __init__(self, objects: Objects, table: ShardTable, grouping: Grouping) -> None:
        self.group, self.span = grouping.group, grouping.span
        self._counts = table.samples_per_shard
        self._reader = PackReader(objects, grouping.objects, "aspects")
        self._rows = RowCache(_MAX_ROWS)
        self._map = RowMap(self._counts, lambda shard: self._rows.get(shard, lambda: self._read(shard)), _MAX_ROWS)

    def of(self, shards: Integers, rows: Integers) -> Integers:
        """Return the aspects of samples, as `encode_aspects`, by shard and row among its live samples.

        Raises:
            CorruptDataError, NotFoundError, UnavailableError: their object cannot be read.
        """
        return self._map(shards, rows)

    def _read(self, shard: int) -> Integers:
        count = int(self._counts[shard])
        codes = self._reader.read(shard, max_values=count)
        if len(codes) != count or codes.max(initial=0) > _MAX_CODE:
            raise self._reader.corrupt(shard, f"shard {shard} has another number of samples, or no aspects")
        return codes


def widened(windows: ShardWindows, span: int, num_samples: int) -> ShardWindows:
    """Return the windows of an order whose samples move inside blocks of `span` positions, see `GroupedOrder`."""
    last = max(1, num_samples // span) - 1
    first = np.minimum(windows.first // span, last) * span
    ends = np.minimum((windows.stop - 1) // span, last)
    return ShardWindows(windows.shards, first, np.where(ends == last, num_samples, (ends + 1) * span))


class _SortedBlocks(NamedTuple):
    """Some blocks of an epoch: `numbers`, ascending, and the permutation of their positions.

    Position p of block `numbers[i]` is at index p + `shifts[i]`: `sources` has the position of its sample in the
    order without groups, and `targets` the position here of the sample that the order without groups has at p.
    """

    numbers: Integers
    shifts: Integers
    sources: Integers
    targets: Integers


class GroupedOrder(AccessOrder):
    """An access order whose positions k * group to (k + 1) * group - 1 have samples of a similar aspect.

    Args:
        order: the order without groups.
        aspects: the aspects of its samples.
    """

    def __init__(self, order: AccessOrder, aspects: Aspects) -> None:
        # Not `super().__init__`: all that the base class computes is that of `order`.
        self.config, self.epoch, self.num_samples = order.config, order.epoch, order.num_samples
        self._order, self._aspects = order, aspects
        self._group, self._span = aspects.group, aspects.span
        self._num_blocks = max(1, self.num_samples // self._span)
        last = self.num_samples - (self._num_blocks - 1) * self._span
        self._num_last, self._num_partial = divmod(last, self._group)
        num_keys = KeyedPermutation.num_keys
        # Without a shuffle, all epochs are alike: an evaluation has the same batches each time.
        epoch = 0 if self.config.shuffle is None else self.epoch
        keys = derive_keys(self.config.seed, epoch, _GROUPS, num_keys + 1)
        sizes = (GROUPS_PER_BLOCK, self._num_last)
        self._of_block, self._of_last = (KeyedPermutation(size, keys[:num_keys]) for size in sizes)
        # Samples that fill no group are at the end, and may be dropped: those of another aspect in each epoch.
        drawn = uniform(keys[num_keys], np.zeros(1, np.int64), 0)[0]
        self._cut = int(drawn * (self._num_last + 1)) * self._group
        self._computed = _SortedBlocks(*(np.empty(0, np.int64),) * 4)

    def locate(self, positions: Integers | Sequence[int]) -> tuple[Integers, Integers]:
        """Return the sample at each position, see `AccessOrder`. Raise also what `Aspects.of` raises."""
        checked = np.asarray(positions, np.int64)
        if checked.size and (checked.min() < 0 or checked.max() >= self.num_samples):
            raise IndexError(f"a position is outside 0..{self.num_samples - 1}")
        return self._order.locate(self._permute(checked, forward=True))

    def positions_of(self, shards: Integers | Sequence[int], rows: Integers | Sequence[int]) -> Integers:
        """Return the position at which each sample is served, see `AccessOrder`, and `Aspects.of`."""
        return self._permute(self._order.positions_of(shards, rows), forward=False)

    def copies_of(self, shards: Integers, rows: Integers) -> tuple[Integers, Integers]:
        """Return all positions of some samples, see `AccessOrder`, and `Aspects.of`."""
        samples, positions = self._order.copies_of(shards, rows)
        return samples, self._permute(positions, forward=False)

    @cached_property
    def windows(self) -> ShardWindows:
        """Positions that may need each shard, see `AccessOrder`."""
        return widened(self._order.windows, self._span, self.num_samples)

    def _permute(self, positions: Integers, *, forward: bool) -> Integers:
        """Return the positions in the order without groups; with `forward=False`, the inverse."""
        blocks = np.minimum(positions // self._span, self._num_blocks - 1)
        by_block = np.argsort(blocks, kind="stable")
        wanted, starts = np.unique(blocks[by_block], return_index=True)
        starts = np.append(starts, len(blocks))
        result = np.empty_like(positions)
        at_once = max(1, _POSITIONS_AT_ONCE // self._span)
        for first in range(0, len(wanted), at_once):
            chunk = wanted[first : first + at_once]
            known = self._computed  # read once: another thread may replace it
            if not np.isin(chunk, known.numbers).all():  # else consecutive steps, which are in one block
                known = self._computed = self._compute(chunk)
            chosen = by_block[starts[first] : starts[first + len(chunk)]]
            index = positions[chosen] + known.shifts[np.searchsorted(known.numbers, blocks[chosen])]
            result[chosen] = (known.sources if forward else known.targets)[index]
        return result

    def _compute(self, blocks: Integers) -> _SortedBlocks:
        """Return some blocks, ascending."""
        starts, is_last = blocks * self._span, blocks == self._num_blocks - 1
        sizes = np.where(is_last, self.num_samples - starts, self._span)
        offsets = np.cumsum(sizes) - sizes
        block = np.repeat(np.arange(len(blocks)), sizes)
        shift, of_last = (offsets - starts)[block], is_last[block]
        positions = np.arange(len(block)) - shift
        # Stable: within an aspect, the order of the samples is the one without groups, which is random.
        by_aspect = np.lexsort((self._aspects.of(*self._order.locate(positions)), block))
        place = np.arange(len(block)) - offsets[block]  # among the sorted samples of the block
        is_after = of_last & (place >= self._cut + self._num_partial)
        is_partial = of_last & (place >= self._cut) & ~is_after
        group, within = np.divmod(place - np.where(is_after, self._num_partial, 0), self._group)
        for permutation, chosen in ((self._of_block, ~of_last), (self._of_last, of_last & ~is_partial)):
            group[chosen] = permutation.permute(group[chosen], blocks[block[chosen]])
        new_place = np.where(
            is_partial, self._num_last * self._group + place - self._cut, group * self._group + within
        )
        index = offsets[block] + new_place
        sources, targets = np.empty_like(positions), np.empty_like(positions)
        sources[index], targets[by_aspect] = positions[by_aspect], index - shift
        return _SortedBlocks(blocks, offsets - starts, sources, targets)
