"""Plans which node sends which object to which other node. Pure: no file is read and nothing is sent here."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
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

    Args:
        objects: of each node, the objects that it has, with their sizes in bytes.
        copies: number of nodes that are to have each object.
        everywhere: objects that all nodes are to have.
    """
    num_nodes = len(objects)
    planned = []
    for digest, (size, holders) in _holders(objects).items():
        wanted = num_nodes if digest in everywhere else min(copies, num_nodes)
        following = [(holders[0] + distance) % num_nodes for distance in range(1, num_nodes)]
        targets = [node for node in following if node not in holders][: max(0, wanted - len(holders))]
        planned += [NodeCopy(digest, size, holders[0], target) for target in targets]
    return planned


def plan_fetches(objects: Sequence[Mapping[Digest, int]], wanted: Sequence[Collection[Digest]]) -> list[NodeCopy]:
    """Return the copies after which each node has the objects that it wants, of those that any node has.

    Of several nodes that have an object, the one with the fewest bytes to send so far sends it.

    Args:
        objects: of each node, the objects that it has, with their sizes in bytes.
        wanted: of each node, the objects that it needs.
    """
    sent_bytes = Counter[int]()
    planned = []
    for digest, (size, holders) in _holders(objects).items():
        for target, needs in enumerate(wanted):
            if digest in needs and target not in holders:
                source = min(holders, key=lambda node: (sent_bytes[node], node))
                sent_bytes[source] += size
                planned.append(NodeCopy(digest, size, source, target))
    return planned


def plan_rounds(
    copies: Iterable[NodeCopy], node: int, num_nodes: int
) -> list[tuple[NodeCopy | None, NodeCopy | None]]:
    """Return what a node sends and receives at the same time, in order; None: nothing.

    In the round with distance d, each node sends to the one that is d after it, and receives from the one that is d
    before it. So all connections are in use at once, and no node waits for another in a cycle.
    """
    planned: list[tuple[NodeCopy | None, NodeCopy | None]] = []
    listed = list(copies)
    for distance in range(1, num_nodes):
        of_round = [copy for copy in listed if (copy.target - copy.source) % num_nodes == distance]
        sent = [copy for copy in of_round if copy.source == node]
        received = [copy for copy in of_round if copy.target == node]
        planned += itertools.zip_longest(sent, received)
    return planned


def missing_objects(needed: Mapping[Digest, int | None], objects: Sequence[Mapping[Digest, int]]) -> list[Digest]:
    """Return the needed objects that no node has, or of another size only; the needed size None means any size."""
    return [
        digest
        for digest, size in needed.items()
        if not any(digest in on_node and size in (None, on_node[digest]) for on_node in objects)
    ]


def _holders(objects: Sequence[Mapping[Digest, int]]) -> dict[Digest, tuple[int, list[int]]]:
    """Return the size of each object, and the nodes that have it, in the order of digests."""
    found: dict[Digest, tuple[int, list[int]]] = {}
    for node, on_node in enumerate(objects):
        for digest, size in on_node.items():
            found.setdefault(digest, (size, []))[1].append(node)
    return dict(sorted(found.items()))
