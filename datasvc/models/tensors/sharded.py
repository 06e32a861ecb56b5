"""Finds which part of a sharded tensor (DTensor) this rank holds, and splits a part into chunks.

Saves store the parts of all ranks as the chunks of one tensor. Restores fill the part of each rank.
"""

from __future__ import annotations

import math
from operator import add
from typing import TYPE_CHECKING, Any, Final

from datasvc.errors import ConfigError
from datasvc.models.tensors.chunks import CHUNK_BYTES, Box, Shape, plan_chunks
from datasvc.models.tensors.tensor_classes import is_sharded

if TYPE_CHECKING:
    import torch

# Chunks of a part of a tensor have 1/16 of the tensor's bytes, but at least 512 KiB and at most `CHUNK_BYTES`.
_MIN_CHUNK_BYTES: Final = 512 << 10
_CHUNKS_PER_TENSOR: Final = 16


def local_part(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Box | None]:
    """Return the part of a tensor that this rank holds, without gradient, and its box in the whole tensor.

    Of a tensor that is not a DTensor, the part is the whole tensor. The box is None if the part has no elements, for
    example on a rank outside of the tensor's mesh. No communication takes place.

    Raises:
        ConfigError: the tensor has partial placements, so that no rank has its values; the message has `name`.
    """
    shape = tuple(tensor.shape)
    if not is_sharded(tensor):
        return tensor.detach(), ((0,) * len(shape), shape) if tensor.numel() else None
    distributed: Any = tensor
    if any(placement.is_partial() for placement in distributed.placements):
        raise ConfigError(
            f"tensor {name!r} has the placements {distributed.placements}: each rank has only a summand of its "
            "values; redistribute it to Shard or Replicate first"
        )
    local = distributed.detach().to_local()
    if distributed.device_mesh.get_coordinate() is None or not local.numel():
        return local, None
    # `torch.distributed.checkpoint` asks a DTensor for its parts by this method.
    (chunk,) = distributed.__create_chunk_list__()
    return local, (tuple(chunk.offsets), tuple(chunk.sizes))


def plan_part_chunks(box: Box, shape: Shape, item_bytes: int) -> list[Box]:
    """Return the boxes of the chunks in which `box` of a tensor of `shape` is stored; [] for an empty box."""
    start, size = box
    if size == shape:
        # Plan the same chunks as an ordinary save does, so that equal tensors are stored only once.
        return plan_chunks(shape, item_bytes)
    # Plan smaller chunks: a restore on another number of ranks needs parts of the box, but reads whole chunks.
    tensor_bytes = math.prod(shape) * item_bytes
    chunk_bytes = min(CHUNK_BYTES, max(_MIN_CHUNK_BYTES, tensor_bytes // _CHUNKS_PER_TENSOR))
    # `plan_chunks` counts from the first element of the box; add the index of this element in the tensor.
    return [
        (tuple(map(add, start, inner)), inner_size)
        for inner, inner_size in plan_chunks(size, item_bytes, chunk_bytes=chunk_bytes)
    ]
