"""The input of a forecast: how a training run reads a data set, and at which rates.

`datasvc cache plan` builds it from its options.
"""

from __future__ import annotations

from dataclasses import dataclass

from datasvc.cache.prefetch.window_budget import BatchesAtOnce
from datasvc.errors import ConfigError
from datasvc.order import OrderConfig, lanes_of_rank


@dataclass(frozen=True)
class Workload:
    """How a run reads a data set.

    Attributes:
        order: parameters of the access order.
        batch_size: samples per rank and step.
        nodes: number of nodes, each with a separate cache.
        ranks_per_node: data-parallel ranks on each node.
        prefetch: batches that each rank prepares in advance, at least 0.
        has_peers: whether nodes read shards from each other.

    Raises:
        ConfigError: a value is out of range.
    """

    order: OrderConfig
    batch_size: int
    nodes: int = 1
    ranks_per_node: int = 1
    prefetch: int = 2
    has_peers: bool = True

    def __post_init__(self) -> None:
        for name in ("batch_size", "nodes", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 1 or more")
        if self.prefetch < 0:
            raise ConfigError(f"prefetch is {self.prefetch}; expected 0 or more")

    @property
    def batches(self) -> BatchesAtOnce:
        """Batches that all ranks together have in progress at once."""
        return BatchesAtOnce(self.batch_size, self._world_size, self.prefetch)

    @property
    def splits_lanes(self) -> bool:
        """Whether each rank reads separate lanes, so that a node reads only the lanes of its ranks."""
        # Either all ranks have lanes of their own or none has, so rank 0 stands for all.
        rank_lanes = lanes_of_rank(self._global_batch, rank=0, world_size=self._world_size, lanes=self.order.lanes)
        return rank_lanes is not None

    @property
    def _world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def _global_batch(self) -> int:
        return self.batch_size * self._world_size


@dataclass(frozen=True)
class Rates:
    """Rates that a run needs, and rates that are available; None: unknown.

    Attributes:
        samples_per_second: samples that one node trains per second.
        origin: bytes per second that the origin sends to all nodes together.
        peers: bytes per second that one node receives from the others.

    Raises:
        ConfigError: a rate is not above zero.
    """

    samples_per_second: float | None = None
    origin: float | None = None
    peers: float | None = None

    def __post_init__(self) -> None:
        for name, rate in (("images/s", self.samples_per_second), ("origin", self.origin), ("peers", self.peers)):
            if rate is not None and not rate > 0:
                raise ConfigError(f"the rate {name} is {rate}; expected more than 0")
