"""Partitions the writes of a distributed save: a pure function assigns each chunk of the shared tensors to a rank.

`distributed_save` calls it. Shared tensors are those that all ranks hold; only one rank stores each of their chunks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping
from typing import Final

from datasvc.models.tensors.chunks import Box, Shape, plan_chunks
from datasvc.models.tensors.tensor_table import ITEM_BYTES

SMALL_BYTES: Final = 64 << 10
"""Chunks below this size are packed, several into one object. Rank 0 stores all of them, so that packs are few."""


def partition_writes(
    tensors: Mapping[str, tuple[str, Shape]], num_ranks: int, *, rank0_only: Collection[str] = ()
) -> list[list[tuple[str, Box]]]:
    """Assign the chunks of tensors to ranks, balanced by bytes as far as whole chunks allow.

    Args:
        tensors: dtype and shape by tensor name.
        num_ranks: number of ranks, at least 1.
        rank0_only: tensors that rank 0 alone stores, because their bytes differ between ranks.

    Returns:
        For each rank the chunks that it stores, each as the tensor's name and the chunk's box (start and shape).
        Every chunk is in exactly one list. Equal arguments give equal results, so each rank computes the same plan
        without messages.
    """
    assigned: list[list[tuple[str, Box]]] = [[] for _ in range(num_ranks)]
    rank0_bytes = 0
    large = []
    # Sort by name, because the ranks may have flattened the same state in different orders.
    for name, (dtype, shape) in sorted(tensors.items()):
        for box in plan_chunks(shape, ITEM_BYTES[dtype]):
            nbytes = math.prod(box[1]) * ITEM_BYTES[dtype]
            if nbytes < SMALL_BYTES or name in rank0_only:
                assigned[0].append((name, box))
                rank0_bytes += nbytes
            else:
                large.append((nbytes, name, box))
    # Heap of (assigned bytes, rank). Rank 0 already has the small chunks, and those that it stores alone.
    loads = [(rank0_bytes if rank == 0 else 0, rank) for rank in range(num_ranks)]
    heapq.heapify(loads)
    # Assign the largest chunk first, to the rank with the smallest load: the greedy rule for balanced partitions.
    for nbytes, name, box in sorted(large, key=lambda chunk: -chunk[0]):
        load_bytes, rank = heapq.heappop(loads)
        assigned[rank].append((name, box))
        heapq.heappush(loads, (load_bytes + nbytes, rank))
    return assigned
