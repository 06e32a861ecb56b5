"""Differentiable collectives, with Horovod's gradients. The backward pass of each one is a collective too.

The synchronous operations of `ops` use this module. A `backward` returns one value per argument of `forward`; it is
None for an argument that is not a tensor.

The gradient of an allreduce is the same allreduce. The gradients of allgather and broadcast are averaged over the
ranks, not summed: otherwise a loss that every rank computes from the same gathered values would count once per rank.
The gradient of an alltoall is sent back to the ranks that the rows came from; the gradient of a reducescatter is
gathered.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from datasvc.trainer.engine.negotiation.requests import CollectiveKind, ReduceOp
from datasvc.trainer.gradients.compression import Compressor
from datasvc.trainer.job import runtime
from datasvc.trainer.job.process_sets import ProcessSet, members_of
from datasvc.trainer.job.submit import (
    check_tensors,
    choose_name,
    new_output,
    submit_allgather,
    submit_allreduce,
    submit_alltoall,
    submit_broadcast,
    submit_reducescatter,
)

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


@dataclass(frozen=True, kw_only=True)
class ReduceOptions:
    """The arguments that `submit_allreduce` and `submit_reducescatter` have in common."""

    op: ReduceOp
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    is_grouped: bool = False
    process_set: ProcessSet


def allreduce(
    tensors: Sequence[Tensor], name: str | None, compression: type[Compressor], reduction: ReduceOptions
) -> list[Tensor]:
    """Compress the tensors, reduce them as one operation, and return the decompressed results as new tensors."""
    return _reduce_compressed(_Allreduce, CollectiveKind.ALLREDUCE, tensors, name, compression, reduction)


def reducescatter(
    tensors: Sequence[Tensor], name: str | None, compression: type[Compressor], reduction: ReduceOptions
) -> list[Tensor]:
    """Compress, reduce and decompress tensors like `allreduce`, but return only this rank's rows of each result."""
    return _reduce_compressed(_Reducescatter, CollectiveKind.REDUCESCATTER, tensors, name, compression, reduction)


def _reduce_compressed(
    function: Any,
    kind: CollectiveKind,
    tensors: Sequence[Tensor],
    name: str | None,
    compression: type[Compressor],
    reduction: ReduceOptions,
) -> list[Tensor]:
    """Apply `function`, which is `_Allreduce` or `_Reducescatter`, to compressed tensors; decompress the results."""
    check_tensors(tensors)  # before a compressor, which may be a user's own
    # Pairs of a compressed tensor and the context that `decompress` needs.
    pairs: list[tuple[Tensor, Any]] = [compression.compress(tensor) for tensor in tensors]
    reduced = _apply(function, choose_name(kind, name), reduction, *(tensor for tensor, _ in pairs))
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def allgather(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, *, is_grouped: bool
) -> list[Tensor]:
    """Return new tensors with the rows of all ranks."""
    return _apply(_Allgather, choose_name(CollectiveKind.ALLGATHER, name), is_grouped, process_set, *tensors)


def broadcast(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
    """Return a new tensor with the values of the root."""
    return _apply(_Broadcast, choose_name(CollectiveKind.BROADCAST, name), root_rank, process_set, tensor)[0]


def alltoall(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet
) -> tuple[Tensor, Tensor]:
    """Return a new tensor with the received rows, and the number of rows from each rank as int32[size] on the CPU."""
    output, received = _apply(_Alltoall, choose_name(CollectiveKind.ALLTOALL, name), splits, process_set, tensor)
    return output, received


def _apply(function: Any, *arguments: Any) -> list[Tensor]:
    """Return the outputs of an autograd function as a list, also if there is only one."""
    outputs = function.apply(*arguments)
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


class _Allreduce(torch.autograd.Function):
    """Allreduce of any number of tensors as one operation."""

    @staticmethod
    def forward(ctx: Any, name: str, reduction: ReduceOptions, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = [new_output(tensor) for tensor in tensors]
        handle = submit_allreduce(tensors, outputs, name=name, **vars(reduction))
        # The name of the forward operation, even a generated one, is equal on all ranks. So the name of the backward
        # operation is equal too.
        ctx.arguments = (f"{handle.name}.gradient", reduction)
        handle.wait()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, None, *_apply(_Allreduce, *ctx.arguments, *gradients))


class _Reducescatter(torch.autograd.Function):
    """Reducescatter; the backward pass gathers the gradients of the rows, and scales them like the values."""

    @staticmethod
    def forward(ctx: Any, name: str, reduction: ReduceOptions, *tensors: Tensor) -> tuple[Tensor, ...]:
        handle = submit_reducescatter(tensors, name=name, **vars(reduction))
        ctx.name, ctx.reduction = f"{handle.name}.gradient", reduction
        result = handle.wait()
        return tuple(result) if isinstance(result, list) else (_tensor(result),)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        reduction: ReduceOptions = ctx.reduction
        # As in Horovod, the gradient of a sum is multiplied by the number of ranks.
        size = len(members_of(reduction.process_set)) if reduction.op is ReduceOp.SUM else 1
        factor = reduction.prescale_factor * reduction.postscale_factor * size
        scaled = [gradient * factor for gradient in gradients]
        return (None, None, *_apply(_Allgather, ctx.name, reduction.is_grouped, reduction.process_set, *scaled))


class _Allgather(torch.autograd.Function):
    """Allgather along the first dimension; each rank gets the averaged gradient of its own rows."""

    @staticmethod
    def forward(
        ctx: Any, name: str, is_grouped: bool, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        handle = submit_allgather(tensors, name=name, is_grouped=is_grouped, process_set=process_set)
        gathered = handle.wait()
        rank_in_set = process_set.rank()
        ctx.name, ctx.is_grouped, ctx.process_set = f"{handle.name}.gradient", is_grouped, process_set
        # For each tensor: the first of this rank's rows in the gathered tensor, and their number.
        ctx.local_rows = [(sum(rows[:rank_in_set]), rows[rank_in_set]) for rows in handle.gathered_rows]
        return tuple(gathered) if isinstance(gathered, list) else (_tensor(gathered),)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        averages = _average(gradients, ctx.name, ctx.process_set, is_grouped=ctx.is_grouped)
        local_gradients = [
            average.narrow(0, first_row, num_rows)
            for average, (first_row, num_rows) in zip(averages, ctx.local_rows, strict=True)
        ]
        return (None, None, None, *local_gradients)


class _Broadcast(torch.autograd.Function):
    """Broadcast; the root gets the averaged gradient, the other ranks get zeros."""

    @staticmethod
    def forward(ctx: Any, name: str, root_rank: int, process_set: ProcessSet, tensor: Tensor) -> Tensor:
        output = new_output(tensor)
        handle = submit_broadcast(tensor, output, root_rank, name=name, process_set=process_set)
        ctx.name, ctx.root_rank, ctx.process_set = f"{handle.name}.gradient", root_rank, process_set
        handle.wait()
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (average,) = _average(gradients, ctx.name, ctx.process_set, is_grouped=False)
        return (None, None, None, average if runtime.rank() == ctx.root_rank else torch.zeros_like(average))


class _Alltoall(torch.autograd.Function):
    """Alltoall; the gradients are sent back to the ranks that the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, name: str, splits: Tensor | Sequence[int] | None, process_set: ProcessSet, tensor: Tensor
    ) -> tuple[Tensor, Tensor]:
        handle = submit_alltoall(tensor, splits, name=name, process_set=process_set)
        output = _tensor(handle.wait())
        received = torch.tensor(handle.received_splits, dtype=torch.int32, device="cpu")
        ctx.arguments = (f"{handle.name}.gradient", list(handle.received_splits), process_set)
        ctx.num_rows = tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradient, _ = _apply(_Alltoall, *ctx.arguments, gradients[0])
        # Rows that were not sent to any rank do not affect the loss: their gradient is zero.
        unsent = gradient.new_zeros((ctx.num_rows - gradient.shape[0], *gradient.shape[1:]))
        return (None, None, None, torch.cat([gradient, unsent]) if unsent.shape[0] else gradient)


def _average(gradients: Sequence[Tensor], name: str, process_set: ProcessSet, *, is_grouped: bool) -> list[Tensor]:
    """Return new tensors with the averages of the gradients over the ranks."""
    reduction = ReduceOptions(op=ReduceOp.AVERAGE, is_grouped=is_grouped, process_set=process_set)
    return _apply(_Allreduce, name, reduction, *gradients)


def _tensor(result: object) -> Tensor:
    """Return the result of an operation on one tensor, with its type for the type checker."""
    assert isinstance(result, Tensor)
    return result


def choose_op(average: bool | None, op: ReduceOp | None, *, stacklevel: int = 3) -> ReduceOp:
    """Return the reduction for the arguments `average` and `op`; Average if both are None.

    Args:
        average: deprecated argument; True for Average, False for Sum.
        op: one of the reductions of this module.
        stacklevel: number of stack frames up to the user's call; the deprecation warning names the line of this call.

    Raises:
        ValueError: both arguments are given, or `op` is not a reduction.
    """
    if op is not None and not isinstance(op, ReduceOp):
        raise ValueError(f"op must be one of hvd.Average, Sum, Adasum, Min, Max, Product, not {op!r}")
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("give either op or average, not both; average is deprecated")
    warnings.warn("average is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=stacklevel)
    return Average if average else Sum
