"""Clusters for which steps are predicted or simulated: nodes and links, and the options that describe them.

`profile` and `tools/simulate_training.py` have the same options.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
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
