"""How fast nodes get their samples: caches in front of an origin that all nodes share. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.profiling.predict.all_reduce import Cluster


@dataclass(frozen=True)
class InputSystem:
    """Where samples come from.

    Attributes:
        batch_bytes: of one rank's batch, as stored.
        data_bytes: of the whole split.
        cache_bytes: of one node's cache; what fits of the data stays there.
        origin_bytes_per_s: of the origin, over all nodes.
        shares_caches: whether nodes take from each other what the origin would have to give again, over the network
            that all-reduces use too; that these slow each other down is left out.
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
        """Return the seconds in which a rank's batch comes through the origin and the network, in the long run.

        A sample is drawn once an epoch, so a cache's hits are the share of the data that it holds.

        Args:
            cluster: the nodes, which draw equally.
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
