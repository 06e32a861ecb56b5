"""Placement: the owner of each object. Nodes with the same list of nodes compute the same owner. Pure.

Rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM Transactions
on Networking, 1998): each node has a pseudo-random weight for each object, and the node with the largest weight is
the owner. When a node leaves, only its objects get a new owner; a node that joins takes an equal share from each of
the others.

The rank of two nodes relative to each other does not depend on other nodes. Requests for an object go only to nodes
of higher rank, so they never wait for each other in a cycle, even while nodes have different lists. This requires
that a node has the same name, in the same spelling, in all lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import xxhash

from datasvc.errors import ConfigError
from datasvc.repository import Digest, Repository
from datasvc.shards.versions.dataset import DatasetVersion, open_dataset

_MAX_SHARDS: Final = 10_000
_MIN_NODES_TO_SPREAD: Final = 16

Node = TypeVar("Node")  # a node, in any form


def rank_nodes(digest: Digest, nodes: Sequence[str]) -> list[str]:
    """Return `nodes` by descending weight for an object. The first is the owner; if it has failed, the second is.

    The order of `nodes` does not matter.
    """
    # Equal weights are sorted by name, so that the order of `nodes` never matters.
    return sorted(nodes, key=lambda node: (-_weight(digest, node), node))


def spreads_load(num_nodes: int) -> bool:
    """Return whether nodes stage in orders of their own (`order_for_node`), and ask for copies (`choose_copy`).

    Few nodes stage in one common order: then they exchange the first objects while the origin sends the next ones.
    With orders of their own, they read all from the origin before they exchange much. Of many nodes, the few owners
    of the objects that all nodes need next are a bottleneck. `datasvc plan staging` shows both.
    """
    return num_nodes >= _MIN_NODES_TO_SPREAD


def order_for_node(digests: Iterable[Digest], node: str) -> list[Digest]:
    """Return objects in the order in which a node stages them: those for which it has the largest weight first.

    So a node begins with the objects that it owns, and each node has another order. In one common order, all nodes
    would request the same few objects from the same few owners, while the links of all others are idle.
    """
    return sorted(digests, key=lambda digest: (-_weight(digest, node), digest))


def choose_copy(digest: Digest, higher: Sequence[Node], node: str) -> Node:
    """Return the node that `node` asks for a copy before it asks the owner, so that the owner does not send them all.

    It is a pseudo-random one of those that rank above `node`. By `order_for_node`, these stage the object early.

    Args:
        digest: the object.
        higher: nodes that rank above `node` for the object, at least one.
        node: the node that needs the object.
    """
    return higher[_weight(digest, node) % len(higher)]


def _weight(digest: Digest, node: str) -> int:
    # A URL has no zero byte, so two different pairs never give the same text.
    return xxhash.xxh3_64_intdigest(f"{node}\0{digest}".encode())


def count_shard_owners(
    repository: Repository, ref: str, nodes: Sequence[str], *, failed: Sequence[str] = ()
) -> dict[str, Any]:
    """Return as JSON values how many shards and bytes of a version each node owns, and how many it serves.

    Of more than 10,000 shards, evenly spaced ones are counted, and the result says how many.

    Args:
        repository: repository of the data set.
        ref: the version.
        nodes: URLs of all nodes, in the spelling that they have of each other.
        failed: nodes that do not respond: the next node in the ranking of a shard serves it.

    Raises:
        ConfigError: there is no node, or a failed node is none of `nodes`.
        NotFoundError, CorruptDataError, UnavailableError: see `open_dataset`.
    """
    if not nodes or not set(failed) <= set(nodes):
        raise ConfigError(f"expected one or more nodes, and those that failed among them; found {nodes}, {failed}")
    dataset = open_dataset(repository, ref)
    num_shards, counted = choose_shards(dataset, _MAX_SHARDS)
    owned = _count(counted, nodes)
    served = _count(counted, [node for node in nodes if node not in set(failed)])
    none = {"shards": 0, "bytes": 0}
    return {
        "dataset": str(dataset.resolved),
        "num_shards": num_shards,
        "num_counted": len(counted),
        "nodes": {node: {"owns": owned[node], "serves": served.get(node, none)} for node in nodes},
    }


def choose_shards(dataset: DatasetVersion, most: int) -> tuple[int, dict[Digest, int]]:
    """Return the number of shards of a version, and sizes in bytes by digest: of all, or of `most` evenly spaced."""
    shards = {shard.digest: shard.size_bytes for split in dataset.values() for shard in split.table.shards()}
    return len(shards), dict(list(shards.items())[:: -(-len(shards) // most) or 1])


def _count(shards: Mapping[Digest, int], nodes: Sequence[str]) -> dict[str, dict[str, int]]:
    counts = {node: {"shards": 0, "bytes": 0} for node in nodes}
    for digest, size_bytes in shards.items() if nodes else ():
        owner = counts[rank_nodes(digest, nodes)[0]]
        owner["shards"] += 1
        owner["bytes"] += size_bytes
    return counts
