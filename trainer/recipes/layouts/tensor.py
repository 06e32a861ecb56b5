"""The axis `tensor`: ranks compute each layer together (Shoeybi et al. 2019, arXiv:1909.08053)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from datasvc.errors import ConfigError


class FusedHeadsParallel(ColwiseParallel):
    """Divides a layer that computes queries, keys and values together; each rank gets whole heads of all three.

    The rows of the weight are queries, keys and values, in this order, and each rank stores a contiguous part, as
    with `ColwiseParallel`: a checkpoint is the same at every number of ranks. The ranks then exchange outputs,
    3 * width / ranks per token, instead of storing rows in an order that depends on the number of ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        group = device_mesh.get_group()
        module.register_forward_hook(lambda _module, _inputs, output: exchange_heads(output, group))
        return module


# By the names that the `tensor_plan` of a model uses.
STYLES: Final[Mapping[str, Callable[[], ParallelStyle]]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "fused-heads": FusedHeadsParallel,
}


def find_tensor_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return how the layers of a model are divided, by their names, from its method `tensor_plan`.

    Raises:
        ConfigError: the plan has an unknown style.
    """
    plan = cast("Callable[[], Mapping[str, str | ParallelStyle]]", model.tensor_plan)()
    return {name: _find_style(name, style) for name, style in plan.items()}


def divide_layers(model: nn.Module, plan: dict[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Divide the layers of a model, or of a stage, over the ranks of `mesh`. Every rank of the mesh calls this."""
    parallelize_module(model, mesh, plan)


def _find_style(name: str, style: str | ParallelStyle) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style not in STYLES:
        raise ConfigError(
            f"tensor_plan has the style {style!r} for {name!r}; expected one of {', '.join(STYLES)}, or a "
            "ParallelStyle"
        )
    return STYLES[style]()


def exchange_heads(output: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange parts of queries, keys and values so that this rank gets those of its heads.

    Args:
        output: `[batch, block, 3 * width / ranks]`: the channels that this rank has computed, a contiguous part of
            the channels of queries, keys and values.
        group: ranks that divide the heads.

    Returns:
        `[batch, block, 3 * width / ranks]`: the queries of the heads of this rank, their keys, and their values.
    """
    order, sent, received = plan_exchange(dist.get_rank(group), dist.get_world_size(group))
    units = output.view(*output.shape[:-1], 3, -1).movedim(-2, 0)[order].contiguous()
    result: Any = all_to_all_single_autograd(units, received, sent, group)
    return cast("torch.Tensor", result.movedim(0, -2).flatten(-2))


def plan_exchange(rank: int, size: int) -> tuple[list[int], list[int], list[int]]:
    """Plan the exchange of heads. A unit is `width / size` channels: rank r has the units 3r to 3r + 2 of 3 * size.

    Unit u has channels of the heads of rank u % size: queries if u < size, else keys if u < 2 * size, else values.

    Returns:
        The order in which this rank sends its three units, how many it sends to each rank, and how many it receives
        from each. Received units are in order: queries, keys, values.
    """
    units = [3 * rank + number for number in range(3)]
    order = sorted(range(3), key=lambda number: (units[number] % size, number))
    sent = [sum(unit % size == target for unit in units) for target in range(size)]
    received = [sum(unit % size == rank for unit in range(3 * source, 3 * source + 3)) for source in range(size)]
    return order, sent, received


# Each rank gathers the keys and values of the whole block, as in the training of Llama 3 (Dubey et al. 2024,
# arXiv:2407.21783, section 3.3.2). torch 2.13 has two of its own, both experimental. `context_parallel` passes keys
# and values around a ring; it has kernels for GPUs only, and takes no mask, so no attention within documents. The
# private `_ContextParallel` gathers them as here, and takes masks; it needs a model with FlexAttention, which is slow
# unless it is compiled, and `compile` does not go with a divided model here.


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
