"""Partitions the writes of a distributed save: assigns the chunks of the common tensors to ranks. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from datasvc.models.tensors.chunks import Box, Shape, plan_chunks
from datasvc.models.tensors.tensor_table import ITEM_BYTES

SMALL_BYTES: Final = 64 << 10
"""Smaller chunks are packed into shared objects; rank 0 stores all of them, so that there is one such object."""


@dataclass(frozen=True)
class ChunkAssignment:
    """A block of a tensor and the rank that stores it.

    Attributes:
        name: name of the tensor.
        box: start and shape of the block in the tensor.
        rank: rank that stores the block.
    """

    name: str
    box: Box
    rank: int


def partition_writes(
    tensors: Mapping[str, tuple[str, Shape]], num_ranks: int, *, rank0_only: Collection[str] = ()
) -> list[ChunkAssignment]:
    """Assign the chunks of tensors to ranks, balanced by bytes as far as whole chunks allow.

    Args:
        tensors: dtype and shape by tensor name.
        num_ranks: number of ranks, at least 1.
        rank0_only: tensors that rank 0 alone stores, because their bytes differ between ranks.

    Returns:
        Every chunk once. Equal arguments give equal results, so that ranks need not exchange the plan.
    """
    chunks = [
        (math.prod(box[1]) * ITEM_BYTES[dtype], name, box)
        for name, (dtype, shape) in sorted(tensors.items())
        for box in plan_chunks(shape, ITEM_BYTES[dtype])
    ]
    assigned, load = [], [0] * num_ranks
    large = []
    for nbytes, name, box in chunks:
        if nbytes < SMALL_BYTES or name in rank0_only:
            assigned.append(ChunkAssignment(name, box, 0))
            load[0] += nbytes
        else:
            large.append((nbytes, name, box))
    heap = [(load_bytes, rank) for rank, load_bytes in enumerate(load)]
    heapq.heapify(heap)
    # Largest chunk first, to the rank with the smallest load: the greedy rule for balanced partitions.
    for nbytes, name, box in sorted(large, key=lambda chunk: -chunk[0]):
        load_bytes, rank = heapq.heappop(heap)
        assigned.append(ChunkAssignment(name, box, rank))
        heapq.heappush(heap, (load_bytes + nbytes, rank))
    return assigned
