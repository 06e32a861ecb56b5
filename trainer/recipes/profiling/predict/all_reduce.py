"""Predicts the time of an all-reduce from the links: alpha-beta models without other traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.profiling.predict.links import Link


@dataclass(frozen=True)
class Cluster:
    """Equal nodes with equally many ranks.

    Attributes:
        num_nodes: number of nodes.
        network: link of a node to the others; its ranks share it.
        ranks_per_node: ranks on each node.
        inside: link of a rank to the others of its node; None: the network is used there too.
        message_s: software overhead of each all-reduce: negotiation, launch, wake-up.
    """

    num_nodes: int
    network: Link
    ranks_per_node: int = 1
    inside: Link | None = None
    message_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.ranks_per_node < 1:
            raise ConfigError(f"{self.num_nodes} nodes of {self.ranks_per_node} ranks; expected at least 1 of each")
        if not 0 <= self.message_s < math.inf:
            raise ConfigError(f"message_s is {self.message_s}; expected a finite number, not below 0")

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return self.num_nodes * self.ranks_per_node

    def describe(self) -> str:
        """Describe a node and its links: "nodes of 8 ranks, 12.5 GB/s and 50 us between them"."""
        text = f"nodes of {self.ranks_per_node} ranks, {self.network} between them"
        return text if self.inside is None else f"{text}, {self.inside} inside"


def all_reduce_s(size_bytes: int, cluster: Cluster) -> float:
    """Return the seconds of one all-reduce over all ranks of a cluster; 0 for one rank.

    With `inside` it is hierarchical: reduce-scatter in each node, rings between the nodes, one for each part, and
    all-gather in each node.
    """
    if cluster.world_size == 1:
        return 0.0
    if cluster.inside is None:
        return cluster.message_s + ring_s(size_bytes, cluster.world_size, cluster.network)
    # Every rank of a node has a ring of its own over the nodes, for its part; together they fill the network.
    within_s = ring_s(size_bytes, cluster.ranks_per_node, cluster.inside)
    return cluster.message_s + within_s + ring_s(size_bytes, cluster.num_nodes, cluster.network)


def ring_s(size_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds of a ring: 2 (N - 1) / N * bytes / bandwidth + 2 (N - 1) * latency.

    Reduce-scatter and all-gather of N - 1 steps each, in which every rank sends one N-th (Patarasuk and Yuan 2009).
    """
    steps = 2 * (num_ranks - 1)
    return steps / num_ranks * size_bytes / link.bytes_per_s + steps * link.latency_s
