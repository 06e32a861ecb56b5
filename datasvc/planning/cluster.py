"""Clusters: nodes and links, the options that describe them, and the seconds of collectives between ranks.

By the alpha-beta model a message takes `latency_s + size_bytes / bytes_per_s`. All-gather, reduce-scatter and
all-reduce are rings (Thakur et al. 2005; Patarasuk and Yuan 2009). If a cluster has links inside its nodes, a group
of ranks on several nodes runs them in two levels: a ring inside each node, and a ring between the nodes for each
part. All groups of a layout communicate at the same time, and share the nodes' links.
"""

from __future__ import annotations

import argparse
import collections
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from datasvc.errors import ConfigError

_FACTORS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}  # of the prefixes of a unit
_BANDWIDTH: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(bE|bps|bit/s|bit|b/s|B/s)")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s)")
_SECONDS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Link:
    """A link on which a message takes `latency_s + size_bytes / bytes_per_s` (Hockney's alpha and beta).

    Attributes:
        bytes_per_s: bandwidth of one direction; both directions can be used at once.
        latency_s: latency of a message, including software overhead.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        # Both are written with `not`, so that NaN is refused too.
        if not self.bytes_per_s > 0:
            raise ConfigError(f"the bandwidth of a link is {self.bytes_per_s} bytes/s; expected more than 0")
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError(f"the latency of a link is {self.latency_s} s; expected a finite number, not below 0")

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e9:g} GB/s and {self.latency_s * 1e6:g} us"


@dataclass(frozen=True)
class Cluster:
    """Equal nodes with equally many ranks.

    Attributes:
        num_nodes: number of nodes.
        network: link of a node to the other nodes, shared by the node's ranks.
        ranks_per_node: ranks on each node.
        inside: link of a rank to the other ranks of its node; None if they communicate over the network too.
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
        """Return a description of a node and its links: "nodes of 8 ranks, 12.5 GB/s and 50 us between them"."""
        text = f"nodes of {self.ranks_per_node} ranks, {self.network} between them"
        return text if self.inside is None else f"{text}, {self.inside} inside"


def add_cluster_options(parser: argparse.ArgumentParser, *, num_nodes: Sequence[int], default_help: str) -> None:
    """Add the options of clusters to a parser.

    Args:
        parser: parser of a command.
        num_nodes: default of `--nodes`.
        default_help: description of this default in the help.
    """
    add = parser.add_argument
    add("--nodes", type=int, nargs="+", default=list(num_nodes), help=f"numbers of nodes [{default_help}]")
    add("--ranks-per-node", type=int, default=1, help="ranks of each node [%(default)s]")
    add("--bandwidth", default="10GbE", help="bandwidth of each node: 10GbE, 100Gbit/s, 25GB/s [%(default)s]")
    add("--latency", default="50us", help="latency of a message between nodes [%(default)s]")
    add("--inside-bandwidth", help="bandwidth between the ranks of a node; all-reduce is then hierarchical")
    add("--inside-latency", help="latency between the ranks of a node [5us]")


def parse_clusters(chosen: argparse.Namespace) -> list[Cluster]:
    """Return a cluster for each number of `--nodes`.

    Raises:
        ConfigError: an option is not valid, or has no effect.
    """
    network = Link(parse_bandwidth(chosen.bandwidth), parse_duration(chosen.latency))
    inside = None
    if chosen.inside_bandwidth is not None:
        inside = Link(parse_bandwidth(chosen.inside_bandwidth), parse_duration(chosen.inside_latency or "5us"))
    elif chosen.inside_latency is not None:
        raise ConfigError("--inside-latency has no effect without --inside-bandwidth; give both, or neither")
    return [Cluster(number, network, chosen.ranks_per_node, inside) for number in chosen.nodes]


def parse_bandwidth(text: str) -> float:
    """Return bytes per second of "10GbE", "100Gbit/s", "200Gb/s" (bits) or "25GB/s" (bytes). Raises ConfigError."""
    match = _BANDWIDTH.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(f"{text!r} is not a bandwidth; write it as 10GbE, 100Gbit/s (bits) or 25GB/s (bytes)")
    # Bandwidths of networks are usually in bits, those of disks and buses in bytes: only "B/s" means bytes.
    units_per_byte = 1.0 if match[3] == "B/s" else 8.0
    return float(match[1]) * _FACTORS[match[2].lower()] / units_per_byte


def parse_duration(text: str) -> float:
    """Return the seconds of "50us", "1.5ms" or "0s". Raises ConfigError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a duration; write it as 50us, 1.5ms or 2s")
    return float(match[1]) * _SECONDS[match[2]]


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
