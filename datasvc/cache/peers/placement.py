"""Which node owns an object: pure, and the same on every node that knows the same names.

Rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM Transactions
on Networking, 1998): every node draws a weight for every object, and the heaviest owns it. A node that leaves moves
only its own objects, one that joins takes an equal share from each of the others.

How two nodes stand to each other never depends on who else is there. So requests for one object, which only go to
nodes that rank above the asker, can never wait for each other in a circle, not even while nodes disagree about who
takes part. That holds as long as a node has one name: the same spelling on every node.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from datasvc.repository import Digest


def rank_nodes(digest: Digest, nodes: Sequence[str]) -> list[str]:
    """Return `nodes` in the order in which they own the object: the first is the owner, the second its deputy.

    The order of `nodes` does not matter.
    """
    return sorted(nodes, key=lambda node: (-_weight(digest, node), node))


def _weight(digest: Digest, node: str) -> int:
    # A zero byte is in no URL, so no two pairs make one text.
    return xxhash.xxh3_64_intdigest(f"{node}\0{digest}".encode())
