"""Gradients through the collectives, as Horovod defines them. Backward passes are collectives too.

The gradient of an allreduce is the same allreduce. Those of allgather and broadcast are averaged, not summed,
over the ranks, so that a loss which every rank computes from the same gathered values is not counted ``size``
times. That of an alltoall goes back the way the rows came; that of a reducescatter is gathered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from datasvc.trainer.engine.negotiation.requests import ReduceOp
from datasvc.trainer.job import runtime
from datasvc.trainer.job.process_sets import ProcessSet, members_of
from datasvc.trainer.job.submit import (
    new_output,
    submit_allgather,
    submit_allreduce,
    submit_alltoall,
    submit_broadcast,
    submit_reducescatter,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceOptions:
    """How values are combined, and among whom; ``factors`` come before and after."""

    op: ReduceOp
    factors: tuple[float, float] = (1.0, 1.0)
    is_grouped: bool = False
    process_set: ProcessSet

    def arguments(self) -> dict[str, Any]:
        """For ``submit_allreduce`` and ``submit_reducescatter``."""
        return {
            "op": self.op,
            "prescale_factor": self.factors[0],
            "postscale_factor": self.factors[1],
            "is_grouped": self.is_grouped,
            "process_set": self.process_set,
        }


def allreduce(tensors: Sequence[Tensor], *, name: str, reduction: ReduceOptions) -> list[Tensor]:
    """New tensors, reduced as one operation."""
    return _apply(_Allreduce, name, reduction, *tensors)


def reducescatter(tensors: Sequence[Tensor], *, name: str, reduction: ReduceOptions) -> list[Tensor]:
    """New tensors with this rank's rows, reduced as one operation."""
    return _apply(_Reducescatter, name, reduction, *tensors)


def allgather(tensors: Sequence[Tensor], *, name: str, is_grouped: bool, process_set: ProcessSet) -> list[Tensor]:
    """New tensors with the rows of all ranks."""
    return _apply(_Allgather, name, is_grouped, process_set, *tensors)


def broadcast(tensor: Tensor, root_rank: int, *, name: str, process_set: ProcessSet) -> Tensor:
    """A new tensor with the root's values."""
    return _apply(_Broadcast, name, root_rank, process_set, tensor)[0]


def alltoall(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, *, name: str, process_set: ProcessSet
) -> tuple[Tensor, Tensor]:
    """A new tensor with the rows that the ranks sent here, and how many came from each, int32 on the CPU."""
    output, received = _apply(_Alltoall, name, splits, process_set, tensor)
    return output, received


def _apply(function: Any, *arguments: Any) -> list[Tensor]:
    outputs = function.apply(*arguments)
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


class _Allreduce(torch.autograd.Function):
    """Reduces any number of tensors as one operation."""

    @staticmethod
    def forward(ctx: Any, name: str, reduction: ReduceOptions, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = [new_output(tensor) for tensor in tensors]
        handle = submit_allreduce(tensors, outputs, name=name, **reduction.arguments())
        ctx.arguments = (f"{handle.name}.gradient", reduction)
        handle.wait()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, None, *_apply(_Allreduce, *ctx.arguments, *gradients))


class _Reducescatter(torch.autograd.Function):
    """Leaves each rank its rows; the gradients of the rows are gathered, scaled as the values were."""

    @staticmethod
    def forward(ctx: Any, name: str, reduction: ReduceOptions, *tensors: Tensor) -> tuple[Tensor, ...]:
        handle = submit_reducescatter(tensors, name=name, **reduction.arguments())
        ctx.name, ctx.reduction = f"{handle.name}.gradient", reduction
        result = handle.wait()
        return tuple(result) if isinstance(result, list) else (_tensor(result),)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        reduction: ReduceOptions = ctx.reduction
        # As Horovod has it: a sum counts once for each rank.
        size = len(members_of(reduction.process_set)) if reduction.op is ReduceOp.SUM else 1
        factor = reduction.factors[0] * reduction.factors[1] * size
        scaled = [gradient * factor for gradient in gradients]
        return (
            None,
            None,
            *allgather(scaled, name=ctx.name, is_grouped=reduction.is_grouped, process_set=reduction.process_set),
        )


class _Allgather(torch.autograd.Function):
    """Gathers along the first dimension; each rank gets back the averaged gradient of its own rows."""

    @staticmethod
    def forward(
        ctx: Any, name: str, is_grouped: bool, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        handle = submit_allgather(tensors, name=name, is_grouped=is_grouped, process_set=process_set)
        gathered = handle.wait()
        place = process_set.rank()
        ctx.name, ctx.is_grouped, ctx.process_set = f"{handle.name}.gradient", is_grouped, process_set
        ctx.windows = [(sum(rows[:place]), rows[place]) for rows in handle.gathered_rows]
        return tuple(gathered) if isinstance(gathered, list) else (_tensor(gathered),)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        averages = _average(gradients, ctx.name, ctx.process_set, is_grouped=ctx.is_grouped)
        own = [average.narrow(0, *window) for average, window in zip(averages, ctx.windows, strict=True)]
        return (None, None, None, *own)


class _Broadcast(torch.autograd.Function):
    """Copies the root's tensor; the averaged gradient goes to the root, zeros to the others."""

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
    """Deals rows; their gradients go back to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, name: str, splits: Tensor | Sequence[int] | None, process_set: ProcessSet, tensor: Tensor
    ) -> tuple[Tensor, Tensor]:
        handle = submit_alltoall(tensor, splits, name=name, process_set=process_set)
        output = _tensor(handle.wait())
        received = torch.tensor(handle.received_splits, dtype=torch.int32)
        ctx.arguments = (f"{handle.name}.gradient", list(handle.received_splits), process_set)
        ctx.num_rows = tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradient, _ = _apply(_Alltoall, *ctx.arguments, gradients[0])
        # Rows that went nowhere have no part in the loss.
        unsent = gradient.new_zeros((ctx.num_rows - gradient.shape[0], *gradient.shape[1:]))
        return (None, None, None, torch.cat([gradient, unsent]) if unsent.shape[0] else gradient)


def _average(gradients: Sequence[Tensor], name: str, process_set: ProcessSet, *, is_grouped: bool) -> list[Tensor]:
    reduction = ReduceOptions(op=ReduceOp.AVERAGE, is_grouped=is_grouped, process_set=process_set)
    return allreduce(gradients, name=name, reduction=reduction)


def _tensor(result: object) -> Tensor:
    assert isinstance(result, Tensor)
    return result
