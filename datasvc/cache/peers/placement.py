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

from collections.abc import Sequence

import xxhash

from datasvc.repository import Digest


def rank_nodes(digest: Digest, nodes: Sequence[str]) -> list[str]:
    """Return `nodes` by descending weight for an object. The first is the owner; if it has failed, the second is.

    The order of `nodes` does not matter.
    """
    # Equal weights are sorted by name, so that the order of `nodes` never matters.
    return sorted(nodes, key=lambda node: (-_weight(digest, node), node))


def _weight(digest: Digest, node: str) -> int:
    # A URL has no zero byte, so two different pairs never give the same text.
    return xxhash.xxh3_64_intdigest(f"{node}\0{digest}".encode())
