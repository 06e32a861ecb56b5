"""The axis `context`: ranks compute successive tokens of each block.

Each rank gathers the keys and values of the whole block, as in the training of Llama 3 (Dubey et al. 2024,
arXiv:2407.21783, section 3.3.2). torch 2.13 has two of its own, both experimental. `context_parallel` passes keys and
values around a ring; it has kernels for GPUs only, and takes no mask, so no attention within documents. The private
`_ContextParallel` gathers them as here, and takes masks; it needs a model with FlexAttention, which is slow unless it
is compiled, and `compile` does not go with a divided model here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


@dataclass(frozen=True)
class ContextSplit:
    """The tokens of each block that one rank computes.

    Attributes:
        index: number of the rank along the axis.
        size: number of ranks.
        num_tokens: tokens of a block on each rank.
        mesh: the ranks, in the order of their tokens: one axis.
    """

    index: int
    size: int
    num_tokens: int
    mesh: DeviceMesh

    @property
    def start(self) -> int:
        """Position of the first token of this rank in the block."""
        return self.index * self.num_tokens

    def gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the parts of all ranks, concatenated along `dim`; gradients flow back to the ranks."""
        parts = DTensor.from_local(tensor, self.mesh, [Shard(dim)])
        # Each rank uses all keys and values for its own queries, so the gradient is the sum over the ranks.
        return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tokens of this rank of `[batch, block]`, as a view."""
        return tensor.narrow(1, self.start, self.num_tokens)
