"""Gradients through the collectives, as Horovod defines them. Backward passes are collectives too.

The gradient of an allreduce is the same allreduce. Those of allgather and broadcast are averaged, not summed,
over the ranks, so that a loss which every rank computes from the same gathered values is not counted ``size``
times.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer import runtime
from trainer.engine.requests import ReduceOp
from trainer.submit import new_output, submit_allgather, submit_allreduce, submit_broadcast


def allreduce(
    tensors: Sequence[Tensor], *, name: str, op: ReduceOp, factors: tuple[float, float], is_grouped: bool
) -> list[Tensor]:
    """New tensors, reduced as one operation; ``factors`` come before and after the reduction."""
    return _apply(_Allreduce, name, op, factors, is_grouped, *tensors)


def allgather(tensor: Tensor, *, name: str) -> Tensor:
    """A new tensor with the rows of all ranks."""
    return _apply(_Allgather, name, tensor)[0]


def broadcast(tensor: Tensor, root_rank: int, *, name: str) -> Tensor:
    """A new tensor with the root's values."""
    return _apply(_Broadcast, name, root_rank, tensor)[0]


def _apply(function: Any, *arguments: Any) -> list[Tensor]:
    outputs = function.apply(*arguments)
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


class _Allreduce(torch.autograd.Function):
    """Reduces any number of tensors as one operation."""

    @staticmethod
    def forward(
        ctx: Any, name: str, op: ReduceOp, factors: tuple[float, float], is_grouped: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.arguments = (f"{name}.gradient", op, factors, is_grouped)
        outputs = [new_output(tensor) for tensor in tensors]
        submit_allreduce(
            tensors,
            outputs,
            name=name,
            op=op,
            prescale_factor=factors[0],
            postscale_factor=factors[1],
            is_grouped=is_grouped,
        ).wait()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, None, None, None, *_apply(_Allreduce, *ctx.arguments, *gradients))


class _Allgather(torch.autograd.Function):
    """Gathers along the first dimension; each rank gets back the averaged gradient of its own rows."""

    @staticmethod
    def forward(ctx: Any, name: str, tensor: Tensor) -> Tensor:
        handle = submit_allgather(tensor, name=name)
        gathered = handle.wait()
        assert isinstance(gathered, Tensor)
        rows, rank = handle.gathered_rows, runtime.rank()
        ctx.name = f"{name}.gradient"
        ctx.start, ctx.num_rows = sum(rows[:rank]), rows[rank]
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, _average(gradients[0], ctx.name).narrow(0, ctx.start, ctx.num_rows))


class _Broadcast(torch.autograd.Function):
    """Copies the root's tensor; the averaged gradient goes to the root, zeros to the others."""

    @staticmethod
    def forward(ctx: Any, name: str, root_rank: int, tensor: Tensor) -> Tensor:
        ctx.name, ctx.root_rank = f"{name}.gradient", root_rank
        output = new_output(tensor)
        submit_broadcast(tensor, output, root_rank, name=name).wait()
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        average = _average(gradients[0], ctx.name)
        return (None, None, average if runtime.rank() == ctx.root_rank else average * 0)


def _average(gradient: Tensor, name: str) -> Tensor:
    return allreduce([gradient], name=name, op=ReduceOp.AVERAGE, factors=(1.0, 1.0), is_grouped=False)[0]
