"""Hierarchical all-reduce: inside the nodes first, so that less is sent between them.

The ranks of a node reduce-scatter a tensor, so that each has the node's sum of one part. The ranks with the same
local rank all-reduce their part over the nodes. Then the ranks of a node all-gather the parts. Of M nodes,
each sends 2 (M - 1) / M times the bytes of the tensor; in a ring over all N ranks, 2 (N - 1) / N times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from datasvc.trainer.engine.execution.wire import as_bytes

# torch 2.13 renamed these functions; their old names issue a FutureWarning.
_reduce_scatter: Final[Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class NodeGroups(NamedTuple):
    """The process groups of one rank, all made by torch.

    Attributes:
        scatter: ranks of this rank's node, in the order of ranks, for the reduce-scatters.
        across: one rank of each node, with the same local rank.
        gather: a second group of the ranks of `scatter`. Gathers and scatters begin in different threads, so in one
            group their order could differ between ranks.
    """

    scatter: dist.ProcessGroup
    across: dist.ProcessGroup
    gather: dist.ProcessGroup


def group_by_node(node_of_rank: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each node, nodes and ranks in increasing order, from the node number of each rank."""
    return [
        [rank for rank, node in enumerate(node_of_rank) if node == number] for number in sorted(set(node_of_rank))
    ]


def explain_flat(nodes: Sequence[Sequence[int]]) -> str:
    """Return why all-reduces over these nodes cannot be hierarchical, for a log line; empty if they can be."""
    sizes = sorted({len(ranks) for ranks in nodes})
    if len(nodes) == 1:
        return "all ranks are on one node"
    if len(sizes) > 1:
        return f"some nodes have {sizes[0]} ranks and others {sizes[-1]}; give each node the same number"
    return "each node has one rank only" if sizes == [1] else ""


class HierarchicalWork:
    """A hierarchical sum of a tensor, in place, that has begun; all ranks get equal bits.

    Every rank of the job constructs one in the same order, and waits for them in the same order.

    Args:
        groups: groups of this rank.
        tensor: flat and contiguous; its length is a multiple of the ranks per node.
        scratch: memory of the same size as the tensor, which belongs to this object until `wait` returns; used only
            for tensors on the CPU.
    """

    def __init__(self, groups: NodeGroups, tensor: Tensor, scratch: Tensor) -> None:
        self._groups, self._tensor, self._scratch = groups, tensor, scratch
        ranks_per_node = dist.get_world_size(groups.scatter)
        # The part that this rank reduces.
        self._part = tensor.chunk(ranks_per_node)[dist.get_rank(groups.scatter)]
        if tensor.is_cuda:
            # On a stream, a wait does not block this thread. Begin all collectives here, so that the threads of all
            # ranks begin those of NCCL in the same order.
            _reduce_scatter(self._part, tensor, group=groups.scatter)
            dist.all_reduce(self._part, group=groups.across)
            self._work = _all_gather(tensor, self._part, group=groups.gather, async_op=True)
        else:
            # `wait` adds the parts: gloo's reduce-scatter would send twice the bytes of an all-to-all.
            self._work = dist.all_to_all_single(
                as_bytes(scratch), as_bytes(tensor), group=groups.scatter, async_op=True
            )

    def wait(self) -> None:
        """Wait until the tensor has the sum; on CUDA, make the current stream wait for it.

        Raises:
            RuntimeError: a collective failed.
        """
        self._work.wait()
        if self._tensor.is_cuda:
            return
        # torch adds half precision in float32, and rounds the sum of the node once.
        torch.sum(self._scratch.view(-1, self._part.numel()), dim=0, out=self._part)
        dist.all_reduce(self._part, group=self._groups.across)
        _all_gather(self._tensor, self._part, group=self._groups.gather)
