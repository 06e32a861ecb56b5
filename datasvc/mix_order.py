"""Which data set serves each position of a mixture, and which of its samples: a pure function of the position.

Positions of all epochs of a mixture are one line. It is cut into blocks; a block holds so many samples of each data
set that after every block none is a whole sample away from its share, however long the line: the weights do not
drift. A keyed permutation says which places of a block those are. The samples of one data set, in the order of the
line, are its own stream: its epoch 0 in its own access order, then its epoch 1, and so on.

Nothing is counted while a run goes on, and memory is O(block), so any position can be asked for at once; and, the
other way, where on the line the samples of a data set's pass lie.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np

from datasvc.keyed_random import Integers, KeyedPermutation, derive_keys
from datasvc.order import OrderConfig

_MIXING, _OWN_ORDER = 33, 34  # purposes of keys; augmentation has 32
_BLOCKS_KEPT: Final = 4


class MixtureSources(NamedTuple):
    """Where samples of a mixture come from.

    Attributes:
        sources: `int64[n]`, numbers of their data sets.
        epochs: `int64[n]`, epochs of these data sets' own orders.
        positions: `int64[n]`, positions in those epochs.
    """

    sources: Integers
    epochs: Integers
    positions: Integers


class _MixBlock(NamedTuple):
    """`int64[block]` each: the data set of each position, and which sample of its stream."""

    sources: Integers
    ordinals: Integers


class MixOrder:
    """The positions of a mixture.

    Args:
        sizes: samples of each data set, at least 1 where its weight is not 0.
        weights: of each, integers from 0 on.
        epoch_samples: samples of one epoch of the mixture.
        block: positions mixed together. A weight that is not 0 is at least `sum(weights) / block`.
        seed: of the choice.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[int], *, epoch_samples: int, block: int, seed: int
    ) -> None:
        self.num_samples = epoch_samples
        self._sizes = np.maximum(np.asarray(sizes, np.int64), 1)
        self._edges = [0, *accumulate(weights)]
        self._block = block
        self._permutation = KeyedPermutation(block, derive_keys(seed, 0, _MIXING, KeyedPermutation.num_keys))
        self._kept: OrderedDict[int, _MixBlock] = OrderedDict()

    def locate(self, epoch: int, positions: Integers) -> MixtureSources:
        """Return where positions of an epoch of the mixture are served from: `int64[n]` in range(num_samples)."""
        blocks, within = np.divmod(epoch * self.num_samples + positions, self._block)
        sources, ordinals = np.empty_like(within), np.empty_like(within)
        cuts = (np.flatnonzero(np.diff(blocks)) + 1).tolist()
        for start, stop in pairwise([0, *cuts, len(blocks)] if len(blocks) else []):
            block = self._read_block(int(blocks[start]))
            sources[start:stop] = block.sources[within[start:stop]]
            ordinals[start:stop] = block.ordinals[within[start:stop]]
        epochs, own = np.divmod(ordinals, self._sizes[sources])
        return MixtureSources(sources, epochs, own)

    def line_of(self, source: int, ordinals: Integers) -> Integers:
        """Return where samples of one data set's stream lie on the line of all epochs: the inverse of `locate`.

        Args:
            source: number of a data set with a weight.
            ordinals: `int64[n]`, places in its stream: epoch of its own order * its samples + position there.

        Returns:
            `int64[n]`: epoch of the mixture * samples of an epoch + position there.
        """
        order = np.argsort(ordinals, kind="stable")
        ascending = ordinals[order]
        found = np.empty_like(ascending)
        start = 0
        while start < len(ascending):
            block = self._block_of(source, int(ascending[start]))
            before, stop = self.served_before(block)[source], self.served_before(block + 1)[source]
            end = int(np.searchsorted(ascending, stop))
            places = np.flatnonzero(self._read_block(block).sources == source)
            found[start:end] = block * self._block + places[ascending[start:end] - before]
            start = end
        result = np.empty_like(found)
        result[order] = found
        return result

    def own_epochs(self, source: int, epoch: int) -> range:
        """Return the epochs of a data set's own order of which an epoch of the mixture may serve a sample."""
        (first, _), (last, position) = (self.cursors(each, 0)[source] for each in (epoch, epoch + 1))
        return range(first, last + (position > 0))

    def cursors(self, epoch: int, position: int) -> list[tuple[int, int]]:
        """Return epoch and position of each data set's own order: all before it is served before `position`."""
        number, within = divmod(epoch * self.num_samples + position, self._block)
        served = self.served_before(number)
        if within:
            sources = self._read_block(number).sources[:within]
            served = (served + np.bincount(sources, minlength=len(served))).tolist()
        return [divmod(count, size) for count, size in zip(served, self._sizes.tolist(), strict=True)]

    def served_before(self, block: int) -> list[int]:
        """Return how many samples of each data set come before a block."""
        # In Python's integers: exact however long the line. The shares lie end to end on it, and each edge is rounded
        # down, so a data set's number is never off its share by one.
        edges = [block * self._block * edge // self._edges[-1] for edge in self._edges]
        return [stop - start for start, stop in pairwise(edges)]

    def most_of(self, run: int) -> list[int]:
        """Return bounds on the samples of each data set among `run` consecutive positions."""
        total = self._edges[-1]
        shares = [stop - start for start, stop in pairwise(self._edges)]
        blocks = run // self._block + 2  # a run may begin and end inside a block
        return [min(run, blocks * (share * self._block // total + 2)) if share else 0 for share in shares]

    def _block_of(self, source: int, ordinal: int) -> int:
        """Return the block that holds a sample of a data set's stream."""
        share = self._edges[source + 1] - self._edges[source]
        number = max(0, (ordinal - 1) * self._edges[-1] // (share * self._block) - 1)
        while self.served_before(number + 1)[source] <= ordinal:
            number += 1
        return number

    def _read_block(self, number: int) -> _MixBlock:
        if number not in self._kept:
            self._kept[number] = self._make_block(number)
            while len(self._kept) > _BLOCKS_KEPT:
                self._kept.popitem(last=False)
        return self._kept[number]

    def _make_block(self, number: int) -> _MixBlock:
        before = np.array(self.served_before(number))
        counts = np.array(self.served_before(number + 1)) - before
        stops = np.cumsum(counts)
        every = np.arange(self._block)
        places = self._permutation.permute(every, np.full(self._block, number))
        sources = np.searchsorted(stops, places, side="right")
        ordinals = np.empty_like(sources)
        # By data set, each in the order of positions: so a data set's own order is kept inside blocks too.
        ordinals[np.argsort(sources, kind="stable")] = every + np.repeat(before - stops + counts, counts)
        return _MixBlock(sources, ordinals)


def own_order(config: OrderConfig, digest: str) -> OrderConfig:
    """Return the access order of one split of a mixture: the loader's, with a seed of its own.

    With one seed for all, splits of equal sizes would be shuffled alike, and samples that go together (two renderings
    of one picture) would come together. The seed depends on the split's samples, not on its place in the mixture.

    Args:
        config: of the loader.
        digest: of the split's shard table.
    """
    seed = int(derive_keys(config.seed, int(digest[:16], 16), _OWN_ORDER, 1)[0])
    return dataclasses.replace(config, seed=seed)
