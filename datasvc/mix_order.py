"""Access order of a mixture of data sets: a pure function from each position to a data set and one of its samples.

The positions of all epochs of a mixture form one sequence, which is split into blocks. After each block, the number
of samples served from each data set differs from its weighted share by less than one, so rounding errors do not add
up. A keyed permutation selects the positions of each data set within a block. The samples of one data set, in the
order of the sequence, are its stream: its epoch 0 in its own access order, then its epoch 1, and so on. In this
module, a source is the number of a data set in the mixture, and an ordinal is the index of a sample in a stream.

The weights may change between blocks, see `mix_schedule`. A stream continues over a change, so that no sample of a
data set is lost or repeated.

There is no state, and memory is O(block). The sample at any position can be computed directly, and so can the
position of any sample.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from datasvc.keyed_random import Integers, KeyedPermutation, derive_keys
from datasvc.mix_schedule import MixSchedule, MixStage
from datasvc.order import OrderConfig

_MIXING, _OWN_ORDER = 33, 34  # values of `purpose` for `derive_keys`; augmentation has 32
_MAX_CACHED_BLOCKS: Final = 4


class MixtureSources(NamedTuple):
    """Data set of each sample, and the sample's epoch and position in the data set's own order: `int64[n]` each."""

    sources: Integers
    epochs: Integers
    positions: Integers


class _MixBlock(NamedTuple):
    """Data set of each position of a block, and index of the sample in its stream: `int64[block]` each."""

    sources: Integers
    ordinals: Integers


class MixOrder:
    """Access order of a mixture.

    Args:
        sizes: number of samples of each data set, at least 1 if its weight is not 0.
        weights: weight of each data set, an integer >= 0. A weight that is not 0 is at least `sum(weights) / block`,
            which is a share of one sample per block.
        epoch_samples: samples of one epoch of the mixture.
        block: number of positions that are mixed together.
        seed: seed of the permutations.
        stages: other weights from later blocks on, ascending.

    Raises:
        ConfigError: see `MixSchedule`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[int],
        *,
        epoch_samples: int,
        block: int,
        seed: int,
        stages: Sequence[MixStage] = (),
    ) -> None:
        self.num_samples = epoch_samples
        # A data set of weight 0 may have no samples. Count one, so that a division by the size is possible.
        self._sizes = np.maximum(np.asarray(sizes, np.int64), 1)
        self._schedule = MixSchedule([MixStage(0, tuple(weights)), *stages], block)
        self._block = block
        self._permutation = KeyedPermutation(block, derive_keys(seed, 0, _MIXING, KeyedPermutation.num_keys))
        self._cached: OrderedDict[int, _MixBlock] = OrderedDict()

    def locate(self, epoch: int, positions: Integers) -> MixtureSources:
        """Return the samples at positions of an epoch of the mixture: `int64[n]` in range(num_samples)."""
        blocks, within = np.divmod(epoch * self.num_samples + positions, self._block)
        sources, ordinals = np.empty_like(within), np.empty_like(within)
        # Neighbouring positions are mostly in one block: look up the block once for all of them.
        cuts = (np.flatnonzero(np.diff(blocks)) + 1).tolist()
        edges = [0, *cuts, len(blocks)] if len(blocks) else []
        for start, stop in pairwise(edges):
            block = self._read_block(int(blocks[start]))
            sources[start:stop] = block.sources[within[start:stop]]
            ordinals[start:stop] = block.ordinals[within[start:stop]]
        epochs, source_positions = np.divmod(ordinals, self._sizes[sources])
        return MixtureSources(sources, epochs, source_positions)

    def line_of(self, source: int, ordinals: Integers) -> Integers:
        """Return the positions of samples of one data set in the sequence of all epochs: the inverse of `locate`.

        Args:
            source: number of a data set that the mixture serves.
            ordinals: `int64[n]`, indices in its stream: own epoch * its number of samples + position in this epoch.

        Returns:
            `int64[n]` in the order of `ordinals`: epoch of the mixture * samples of an epoch + position in the epoch.
        """
        # Sort the samples, so that each block is computed once.
        order = np.argsort(ordinals, kind="stable")
        ascending = ordinals[order]
        positions = np.empty_like(ascending)
        start = 0
        while start < len(ascending):
            block = self._schedule.block_of(source, int(ascending[start]))
            # The block has the samples `first_ordinal` to `stop_ordinal` of the data set. `in_block` has the position
            # of each of them in the block.
            first_ordinal = self.served_before(block)[source]
            stop_ordinal = self.served_before(block + 1)[source]
            in_block = np.flatnonzero(self._read_block(block).sources == source)
            end = int(np.searchsorted(ascending, stop_ordinal))
            positions[start:end] = block * self._block + in_block[ascending[start:end] - first_ordinal]
            start = end
        result = np.empty_like(positions)
        result[order] = positions
        return result

    def own_epochs(self, source: int, epoch: int) -> range:
        """Return the epochs of a data set's own order from which an epoch of the mixture may serve samples."""
        first, _ = self.cursors(epoch, 0)[source]
        last, position = self.cursors(epoch + 1, 0)[source]
        return range(first, last + (position > 0))  # at position 0, no sample of the epoch `last` was served

    def cursors(self, epoch: int, position: int) -> list[tuple[int, int]]:
        """Return the epoch and position in each data set's own order at a position of the mixture.

        All samples of a data set before its cursor are served before `position`, and no others.
        """
        number, within = divmod(epoch * self.num_samples + position, self._block)
        served = self.served_before(number)
        if within:
            sources = self._read_block(number).sources[:within]
            served = (served + np.bincount(sources, minlength=len(served))).tolist()
        return [divmod(count, size) for count, size in zip(served, self._sizes.tolist(), strict=True)]

    def served_before(self, block: int) -> list[int]:
        """Return the number of samples of each data set that are served before a block."""
        return self._schedule.served_before(block)

    def most_of(self, run: int) -> list[int]:
        """Return for each data set an upper bound of its number of samples among any `run` consecutive positions."""
        num_blocks = run // self._block + 2  # a run may start and end inside a block
        return [min(run, num_blocks * most) for most in self._schedule.most_in_block()]

    def _read_block(self, number: int) -> _MixBlock:
        """Return a block from the few that are cached, or compute it."""
        if number not in self._cached:
            self._cached[number] = self._make_block(number)
            while len(self._cached) > _MAX_CACHED_BLOCKS:
                self._cached.popitem(last=False)
        return self._cached[number]

    def _make_block(self, number: int) -> _MixBlock:
        """Return a block: assign its positions to data sets, by weight and permuted."""
        first_ordinals = np.array(self.served_before(number))
        counts = np.array(self.served_before(number + 1)) - first_ordinals
        stops = np.cumsum(counts)
        starts = stops - counts
        positions = np.arange(self._block)
        # Data set n gets the positions that are permuted into range(starts[n], stops[n]). The number of the block is
        # the tweak, so that each block has its own permutation.
        permuted = self._permutation.permute(positions, np.full(self._block, number))
        sources = np.searchsorted(stops, permuted, side="right")
        # Number the samples of each data set by position, so that its own order holds inside blocks too. Sorted by
        # data set, the samples of data set n are at starts[n] to stops[n].
        ordinals = np.empty_like(sources)
        ordinals[np.argsort(sources, kind="stable")] = positions + np.repeat(first_ordinals - starts, counts)
        return _MixBlock(sources, ordinals)


def own_order(config: OrderConfig, digest: str) -> OrderConfig:
    """Return the parameters of the access order of one split of a mixture: `config` with another seed.

    `digest` is that of the split's shard table.
    """
    # With the same seed, splits of equal sizes would have the same permutation. Related samples, such as two versions
    # of one image, would be served together. The seed depends on the split's samples, not on its index in the
    # mixture: 64 bits of the digest take the place of the epoch.
    seed = int(derive_keys(config.seed, int(digest[:16], 16), _OWN_ORDER, 1)[0])
    return dataclasses.replace(config, seed=seed)
