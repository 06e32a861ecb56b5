"""Seconds of collectives by the alpha-beta model: a message takes `latency_s + size_bytes / bytes_per_s`.

All-gather, reduce-scatter and all-reduce are rings (Thakur et al. 2005; Patarasuk and Yuan 2009). If a cluster has
links inside its nodes, a group of ranks on several nodes runs them in two levels: a ring inside each node, and a ring
between the nodes for each part. All groups of a layout communicate at the same time, and share the nodes' links.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.profiling.predict.cluster import Cluster, Link


@dataclass(frozen=True)
class LinkedRanks:
    """A group of ranks that communicate, and how it is distributed over nodes.

    Attributes:
        num_nodes: number of nodes that have a rank of the group.
        ranks_per_node: ranks of the group on each of these nodes.
        groups_per_node: number of such groups whose messages share the link of a node to the network.
    """

    num_nodes: int = 1
    ranks_per_node: int = 1
    groups_per_node: int = 1

    def __post_init__(self) -> None:
        if min(self.num_nodes, self.ranks_per_node, self.groups_per_node) < 1:
            raise ConfigError(f"{self}; expected at least 1 of each")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.num_nodes * self.ranks_per_node


def all_ranks(cluster: Cluster) -> LinkedRanks:
    """Return the group of all ranks of a cluster."""
    return LinkedRanks(cluster.num_nodes, cluster.ranks_per_node)


def place_group(ranks: Sequence[int], ranks_per_node: int) -> LinkedRanks:
    """Return how a group of ranks is distributed over nodes of `ranks_per_node` consecutive ranks.

    All groups are assumed to be distributed alike, so a node has `ranks_per_node` divided by the ranks of this group
    on it. A group that is unevenly distributed counts as if it had its largest number of ranks on every node.
    """
    nodes = collections.Counter(rank // ranks_per_node for rank in ranks)
    num_nodes, ranks_on_node = len(nodes), max(nodes.values())
    groups_per_node = max(1, ranks_per_node // ranks_on_node) if num_nodes > 1 else 1
    return LinkedRanks(num_nodes, ranks_on_node, groups_per_node)


def all_gather_s(size_bytes: float, group: LinkedRanks, cluster: Cluster) -> float:
    """Return the seconds in which each rank gets the parts of all ranks; 0 for one rank.

    Args:
        size_bytes: bytes of all parts together.
        group: ranks of the collective.
        cluster: links between the ranks.
    """
    if group.size == 1:
        return 0.0
    return cluster.message_s + sum(_ring_s(size_bytes, *level) for level in _levels(group, cluster))


def reduce_scatter_s(size_bytes: float, group: LinkedRanks, cluster: Cluster) -> float:
    """Return the seconds in which each rank gets the sum of its part; `size_bytes` counts all parts.

    It sends what an all-gather sends, in the other direction.
    """
    return all_gather_s(size_bytes, group, cluster)


def all_reduce_s(size_bytes: float, group: LinkedRanks, cluster: Cluster) -> float:
    """Return the seconds of an all-reduce of `size_bytes`: a reduce-scatter and an all-gather."""
    if group.size == 1:
        return 0.0
    # Both contain `message_s`, the cost of negotiation and launch, which occurs once.
    return 2 * all_gather_s(size_bytes, group, cluster) - cluster.message_s


def all_to_all_s(size_bytes: float, group: LinkedRanks, cluster: Cluster) -> float:
    """Return the seconds in which each rank sends each other rank, in turn, a different part of its `size_bytes`."""
    if group.size == 1:
        return 0.0
    part_bytes = size_bytes / group.size
    seconds = cluster.message_s
    inside = cluster.inside or cluster.network
    seconds += (group.ranks_per_node - 1) * (inside.latency_s + part_bytes / inside.bytes_per_s)
    # Each rank of a node sends its parts to the ranks of the other nodes through the one link of the node.
    num_others = group.size - group.ranks_per_node
    shared_bytes = part_bytes * group.ranks_per_node * group.groups_per_node
    return seconds + num_others * (cluster.network.latency_s + shared_bytes / cluster.network.bytes_per_s)


def send_s(size_bytes: float, group: LinkedRanks, cluster: Cluster) -> float:
    """Return the seconds of a message from a rank to the next rank of its group; 0 for one rank.

    If the group is on several nodes, some of these messages cross nodes, and the slowest one counts.
    """
    if group.size == 1:
        return 0.0
    link, sharing = cluster.network, group.groups_per_node
    if group.num_nodes == 1:
        link, sharing = cluster.inside or cluster.network, 1
    return cluster.message_s + link.latency_s + size_bytes * sharing / link.bytes_per_s


def _levels(group: LinkedRanks, cluster: Cluster) -> Iterable[tuple[int, Link, int]]:
    """Yield the rings of a collective: number of ranks, link, and number of rings that share the link."""
    if group.num_nodes == 1:
        yield group.ranks_per_node, cluster.inside or cluster.network, 1
    elif cluster.inside is None:
        # One ring over all ranks enters and leaves each node once.
        yield group.size, cluster.network, group.groups_per_node
    else:
        yield group.ranks_per_node, cluster.inside, 1
        # Each rank of a node has a ring for its part. These rings send all bytes together, so they count as one.
        yield group.num_nodes, cluster.network, group.groups_per_node


def _ring_s(size_bytes: float, num_ranks: int, link: Link, sharing: int) -> float:
    num_messages = num_ranks - 1
    return num_messages * (size_bytes * sharing / num_ranks / link.bytes_per_s + link.latency_s)
