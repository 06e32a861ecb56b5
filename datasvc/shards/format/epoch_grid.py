"""How often an epoch serves each sample of a weighted split: a systematic grid over the table.

An epoch has N samples with the total weight W. Sample i has the weights from C_i to C_i + w_i of the cumulative
weight. The grid has the points v * W + o for v in range(N), with an offset o of the epoch. The sample is served once
for each point in [N * C_i, N * (C_i + w_i)): N * w_i / W times, rounded down or up, and never if its weight is 0.
Weights are integers, so all machines compute the same grid (systematic sampling: Madow, Ann. Math. Stat. 20, 1949).

The shards have the order of the table, so the sum of the weights of a shard says how many samples an epoch serves of
it. Within a shard, each epoch permutes the samples: otherwise the grid would prefer the classes of a source in which
classes take turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from datasvc.keyed_random import Integers, derive_keys, uniform
from datasvc.order import OrderConfig

_PURPOSE: Final = 4  # the order uses 1 to 3, see `datasvc.order`
_MAX_EXACT: Final = 1 << 62


@dataclass(frozen=True)
class EpochGrid:
    """The grid of one epoch.

    Attributes:
        num_samples: samples of the epoch, N.
        total: sum of all weights, W; positive.
        offset: the offset o, in range(total).
        key: key of the permutations within shards.
    """

    num_samples: int
    total: int
    offset: int
    key: np.uint64

    @classmethod
    def of_epoch(cls, num_samples: int, total: int, config: OrderConfig, epoch: int) -> EpochGrid:
        """Return the grid of an epoch of an access order; with sticky lanes, each epoch has that of epoch 0."""
        keys = derive_keys(config.seed, 0 if config.sticky else epoch, _PURPOSE, 2)
        return cls(num_samples, total, int(keys[0]) % total, keys[1])

    def copies(self, before: int, first: int, weights: Integers) -> Integers:
        """Return how often each sample of a shard is served: `int64[n]`.

        Args:
            before: sum of the weights of all earlier shards.
            first: number of the first sample of the shard in the split.
            weights: `int64[n]`, weights of its samples.
        """
        order = np.argsort(uniform(self.key, first + np.arange(len(weights)), 0), kind="stable")
        copies = np.empty(len(weights), np.int64)
        copies[order] = self.counts(before, weights[order])
        return copies

    def counts(self, before: int, weights: Integers) -> Integers:
        """Return the number of points in each of some consecutive ranges of the cumulative weight: `int64[n]`.

        Args:
            before: the cumulative weight at which the first range begins.
            weights: `int64[n]`, length of each range.
        """
        # Exact at any size: the large part is one Python integer, and the rest of a shard fits into 62 bits.
        _, remainder = divmod(self.num_samples * before - self.offset, self.total)
        sums = np.concatenate([[0], np.cumsum(weights)])
        if self.num_samples * int(sums[-1]) + self.total >= _MAX_EXACT:
            sums = sums.astype(object)
        points = -(-(remainder + self.num_samples * sums) // self.total)  # rounded up
        return np.asarray(np.diff(points), np.int64)
