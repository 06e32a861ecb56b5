"""Who stores what: the pieces of tensors that all ranks have, dealt over the ranks. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from datasvc.models.tensors.chunks import Box, Shape, plan_pieces
from datasvc.models.tensors.tensor_table import ITEM_BYTES

SMALL_BYTES: Final = 64 << 10
"""Pieces that share an object with others: one rank has them all, so that there is one such object."""


@dataclass(frozen=True)
class ChunkAssignment:
    """A block of a tensor and who stores it.

    Attributes:
        name: of the tensor.
        box: start and shape of the block in it.
        rank: who.
    """

    name: str
    box: Box
    rank: int


def partition_writes(
    tensors: Mapping[str, tuple[str, Shape]], num_ranks: int, *, of_first: Collection[str] = ()
) -> list[ChunkAssignment]:
    """Deal the pieces of tensors over ranks, equally many bytes to each as nearly as whole pieces allow.

    Args:
        tensors: dtype and shape by name.
        num_ranks: at least 1.
        of_first: tensors that rank 0 stores alone: the others have other bytes.

    Returns:
        Every piece once; the same for the same arguments, so that ranks need not talk about it.
    """
    pieces = [
        (math.prod(box[1]) * ITEM_BYTES[dtype], name, box)
        for name, (dtype, shape) in sorted(tensors.items())
        for box in plan_pieces(shape, ITEM_BYTES[dtype])
    ]
    dealt, load = [], [0] * num_ranks
    rest = []
    for nbytes, name, box in pieces:
        if nbytes < SMALL_BYTES or name in of_first:
            dealt.append(ChunkAssignment(name, box, 0))
            load[0] += nbytes
        else:
            rest.append((nbytes, name, box))
    heap = [(held, rank) for rank, held in enumerate(load)]
    heapq.heapify(heap)
    for nbytes, name, box in sorted(rest, key=lambda piece: -piece[0]):
        held, rank = heapq.heappop(heap)
        dealt.append(ChunkAssignment(name, box, rank))
        heapq.heappush(heap, (held + nbytes, rank))
    return dealt
