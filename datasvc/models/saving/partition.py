"""Partitions the writes of a distributed save: a pure function assigns each chunk of the shared tensors to a rank.

`distributed_save` calls it. Shared tensors may be whole on all ranks, or divided among them; only one of the ranks
that hold a chunk stores it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from typing import Final

from datasvc.models.saving.shared_plan import BlockId, SharedPlan
from datasvc.models.tensors.chunks import Box, plan_part_chunks
from datasvc.models.tensors.tensor_table import ITEM_BYTES

SMALL_BYTES: Final = 64 << 10
"""Chunks below this size are packed, several into one object. The first rank that holds one stores it, so that packs
are few."""


def partition_writes(
    plan: SharedPlan, num_ranks: int, *, first_only: Collection[BlockId] = ()
) -> list[list[tuple[str, Box]]]:
    """Assign the chunks of blocks to ranks that hold them, balanced by bytes as far as whole chunks allow.

    Args:
        plan: blocks of the shared tensors, and the ranks that hold each.
        num_ranks: number of ranks, at least 1.
        first_only: blocks that the first of their ranks alone stores, because their bytes differ between the ranks.

    Returns:
        For each rank the chunks that it stores, each as the tensor's name and the chunk's box (start and shape).
        Every chunk is in exactly one list. Equal arguments give equal results, so each rank computes the same plan
        without messages.
    """
    assigned: list[list[tuple[str, Box]]] = [[] for _ in range(num_ranks)]
    load_bytes = [0] * num_ranks
    large = []
    for block in plan.blocks:
        dtype, shape = plan.tensors[block.name]
        is_fixed = len(block.ranks) == 1 or block.id in first_only
        for box in plan_part_chunks(block.box, shape, ITEM_BYTES[dtype]):
            nbytes = math.prod(box[1]) * ITEM_BYTES[dtype]
            if is_fixed or nbytes < SMALL_BYTES:
                assigned[block.ranks[0]].append((block.name, box))
                load_bytes[block.ranks[0]] += nbytes
            else:
                large.append((nbytes, block, box))
    # Assign the largest chunk first, to the rank with the smallest load: the greedy rule for balanced partitions.
    large.sort(key=lambda chunk: -chunk[0])
    # Chunks that only some ranks hold come first. A search over these few ranks is fast; for chunks that all ranks
    # hold, a heap of (load, rank) finds the rank.
    for nbytes, block, box in large:
        if len(block.ranks) < num_ranks:
            rank = min(block.ranks, key=lambda rank: (load_bytes[rank], rank))
            assigned[rank].append((block.name, box))
            load_bytes[rank] += nbytes
    loads = [(load, rank) for rank, load in enumerate(load_bytes)]
    heapq.heapify(loads)
    for nbytes, block, box in large:
        if len(block.ranks) == num_ranks:
            load, rank = heapq.heappop(loads)
            assigned[rank].append((block.name, box))
            heapq.heappush(loads, (load + nbytes, rank))
    return assigned
