"""Parts of tensors: what a rank stores of a distributed tensor, and whole states from the parts of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
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


def gather_tree(tree: Any, groups: Sequence[dist.ProcessGroup]) -> Any:
    """Return a state tree with whole tensors, from the parts of all ranks. Every rank calls this.

    Args:
        tree: nested dicts and lists; the ranks of a group may have different keys.
        groups: ranks whose trees are joined, after the tensors are whole.
    """
    whole = _gather_tensors(tree)
    for group in groups:
        trees: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(trees, whole, group=group)
        whole = trees[0]
        for other in trees[1:]:
            whole = _join(whole, other)
    return whole


def _gather_tensors(tree: Any) -> Any:
    if isinstance(tree, DTensor):
        return tree.full_tensor()
    if isinstance(tree, Mapping):
        return {key: _gather_tensors(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_gather_tensors(value) for value in tree)
    return tree


def _join(first: Any, second: Any) -> Any:
    """Return the keys of both trees; where both have a value, the one of the first."""
    if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
        return first
    both = {key: _join(value, second[key]) if key in second else value for key, value in first.items()}
    return both | {key: value for key, value in second.items() if key not in first}
