"""Predicts the rate at which nodes get samples, from their caches and a shared origin. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.profiling.predict.all_reduce import Cluster


@dataclass(frozen=True)
class InputSystem:
    """The caches and the origin of the samples.

    Attributes:
        batch_bytes: of one rank's batch, as stored.
        data_bytes: of the whole split.
        cache_bytes: of one node's cache, which keeps the part of the data that fits.
        origin_bytes_per_s: of the origin, for all nodes together.
        shares_caches: whether nodes read from each other before they read from the origin. Contention with
            all-reduces on the network is not modelled.
    """

    batch_bytes: int
    data_bytes: int
    cache_bytes: int
    origin_bytes_per_s: float
    shares_caches: bool = False

    def __post_init__(self) -> None:
        if self.batch_bytes < 0 or self.data_bytes < 1 or self.cache_bytes < 0 or not self.origin_bytes_per_s > 0:
            raise ConfigError(f"{self} cannot feed anybody; expected sizes and a bandwidth above 0")

    def fetch_s(self, cluster: Cluster, *, is_first_epoch: bool = False) -> float:
        """Return the mean seconds that origin and network need for a rank's batch.

        A sample is read once an epoch, so the hit rate of a cache is the share of the data that it holds.

        Args:
            cluster: the nodes, which read equally.
            is_first_epoch: caches are empty.
        """
        node_bytes = self.batch_bytes * cluster.ranks_per_node
        kept = 0.0 if is_first_epoch else min(1.0, self.cache_bytes / self.data_bytes)
        together = 0.0 if is_first_epoch else min(1.0, cluster.num_nodes * self.cache_bytes / self.data_bytes)
        missed_here = 1.0 - kept
        missed_everywhere = 1.0 - together if self.shares_caches else missed_here
        from_origin_s = node_bytes * cluster.num_nodes * missed_everywhere / self.origin_bytes_per_s
        into_node_s = node_bytes * missed_here / cluster.network.bytes_per_s
        return max(from_origin_s, into_node_s)


UNLIMITED = InputSystem(batch_bytes=0, data_bytes=1, cache_bytes=1, origin_bytes_per_s=math.inf)
"""Everything is in the node's cache."""
