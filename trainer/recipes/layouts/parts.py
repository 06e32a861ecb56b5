"""Parts of tensors: what a rank stores of a distributed tensor, and whole states from the parts of all ranks."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank stores, as a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill_part(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy into a tensor the part that this rank stores of `whole`, which has the shape of the whole tensor."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    local = target.to_local()
    if local.numel():
        # `torch.distributed.checkpoint` asks a DTensor for its part by this method.
        (chunk,) = cast("Any", target).__create_chunk_list__()
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        local.copy_(whole[box])
