"""Plans which node sends which object to which other node. Pure: no file is read and nothing is sent here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from datasvc.repository import Digest


class NodeCopy(NamedTuple):
    """An object that a node sends to another one.

    Attributes:
        digest: digest of the object.
        size_bytes: its size.
        source: index of the node that has it.
        target: index of the node that gets it.
    """

    digest: Digest
    size_bytes: int
    source: int
    target: int


def plan_copies(
    objects: Sequence[Mapping[Digest, int]], *, copies: int, everywhere: Collection[Digest] = ()
) -> list[NodeCopy]:
    """Return the copies after which each object is on `copies` nodes, or on all if there are fewer.

    The further copies of an object are on the nodes that follow its first one, so that each node has about as many.
    All nodes compute the same list, and send and receive in its order, so that none waits for another in a cycle.

    Args:
        objects: of each node, the objects that it has, with their sizes in bytes.
        copies: number of nodes that are to have each object.
        everywhere: objects that all nodes are to have.
    """
    num_nodes = len(objects)
    sizes = {digest: size for on_node in objects for digest, size in on_node.items()}
    planned = []
    for digest in sorted(sizes):
        first = next(node for node in range(num_nodes) if digest in objects[node])
        wanted = num_nodes if digest in everywhere else min(copies, num_nodes)
        holders = [(first + distance) % num_nodes for distance in range(num_nodes)]
        num_missing = wanted - sum(digest in on_node for on_node in objects)
        lacking = [node for node in holders if digest not in objects[node]]
        planned += [NodeCopy(digest, sizes[digest], first, target) for target in lacking[: max(0, num_missing)]]
    return planned


def missing_objects(needed: Mapping[Digest, int | None], objects: Sequence[Mapping[Digest, int]]) -> list[Digest]:
    """Return the needed objects that no node has in the needed size; None: any size."""
    return [
        digest
        for digest, size in needed.items()
        if not any(digest in on_node and size in (None, on_node[digest]) for on_node in objects)
    ]
