"""How a training run uses a data set, and how fast: what `forecast` must be told."""

from __future__ import annotations

from dataclasses import dataclass

from datasvc.errors import ConfigError
from datasvc.order import OrderConfig, lanes_of_rank


@dataclass(frozen=True)
class Workload:
    """How a run uses a data set.

    Attributes:
        order: the order's parameters.
        batch_size: samples of a rank per step.
        nodes: how many, each with a cache of its own.
        ranks_per_node: data-parallel ranks on each.
        prefetch: batches under way while a rank trains.
        has_peers: whether nodes get shards from each other.

    Raises:
        ConfigError: out of range.
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
    def run(self) -> int:
        """Positions under way at once over all ranks."""
        return self._global_batch * (self.prefetch + 1)

    @property
    def splits_lanes(self) -> bool:
        """Whether each rank reads lanes of its own, and a node nothing but those of its ranks."""
        own = lanes_of_rank(self._global_batch, rank=0, world_size=self._world_size, lanes=self.order.lanes)
        return own is not None

    @property
    def _world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def _global_batch(self) -> int:
        return self.batch_size * self._world_size


@dataclass(frozen=True)
class Rates:
    """What a run needs and gets; None where nobody says.

    Attributes:
        samples_per_second: that one node trains.
        origin: bytes per second that the origin gives to all nodes together.
        peers: bytes per second that a node gets from the others.

    Raises:
        ConfigError: out of range.
    """

    samples_per_second: float | None = None
    origin: float | None = None
    peers: float | None = None

    def __post_init__(self) -> None:
        for name, rate in (("images/s", self.samples_per_second), ("origin", self.origin), ("peers", self.peers)):
            if rate is not None and not rate > 0:
                raise ConfigError(f"the rate {name} is {rate}; expected more than 0")
