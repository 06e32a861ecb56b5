"""Command-line options that describe the clusters to predict or to simulate."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.profiling.predict.all_reduce import Cluster
from datasvc.trainer.recipes.profiling.predict.links import Link, parse_bandwidth, parse_duration


def add_cluster_options(parser: argparse.ArgumentParser, *, num_nodes: Sequence[int], said: str) -> None:
    """Add the options of clusters to a parser.

    Args:
        parser: of a command.
        num_nodes: default numbers of nodes.
        said: description of this default in the help.
    """
    add = parser.add_argument
    add("--nodes", type=int, nargs="+", default=list(num_nodes), help=f"numbers of nodes [{said}]")
    add("--ranks-per-node", type=int, default=1, help="of each [%(default)s]")
    add("--bandwidth", default="10GbE", help="of each node: 10GbE, 100Gbit/s, 25GB/s [%(default)s]")
    add("--latency", default="50us", help="of a message between nodes [%(default)s]")
    add("--inside-bandwidth", help="between the ranks of a node: all-reduce is then hierarchical")
    add("--inside-latency", help="likewise [5us]")


def parse_clusters(chosen: argparse.Namespace) -> list[Cluster]:
    """Return a cluster for each number of nodes.

    Raises:
        ConfigError: an option is not valid, or options contradict each other.
    """
    network = Link(parse_bandwidth(chosen.bandwidth), parse_duration(chosen.latency))
    inside = None
    if chosen.inside_bandwidth is not None:
        inside = Link(parse_bandwidth(chosen.inside_bandwidth), parse_duration(chosen.inside_latency or "5us"))
    elif chosen.inside_latency is not None:
        raise ConfigError("--inside-latency says nothing without --inside-bandwidth")
    return [Cluster(number, network, chosen.ranks_per_node, inside) for number in chosen.nodes]
