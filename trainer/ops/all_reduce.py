"""Allreduce: every rank gets the reduction of the tensors of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from datasvc.trainer.engine.execution.handles import Handle
from datasvc.trainer.engine.negotiation.requests import CollectiveKind, ReduceOp
from datasvc.trainer.gradients.compression import Compression, Compressor
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set
from datasvc.trainer.job.submit import choose_name, new_output, submit_allreduce
from datasvc.trainer.ops import autograd
from datasvc.trainer.ops.reductions import choose_op


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce the tensor over the ranks into a new tensor. Differentiable.

    Args:
        tensor: tensor of the same shape and dtype on every rank.
        average: deprecated; True means `op=Average`, False `op=Sum`.
        name: name of the operation, the same on all ranks; None to number it in the order of calls.
        compression: encoding of the values that are sent.
        op: reduction, by default Average. Sums of integers do not overflow, and averages are truncated toward zero.
        prescale_factor: factor for each tensor before the reduction.
        postscale_factor: factor for the result of the reduction.
        process_set: ranks that take part, by default all.

    Raises:
        OverflowError: the result, of integers, does not fit their dtype; on every rank. Products of int64 are not
            checked.
    """
    reduction = autograd.ReduceOptions(
        op=choose_op(average, op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    return autograd.allreduce([tensor], name, compression, reduction)[0]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an `allreduce`; do not change the tensor before `synchronize`. Not differentiable."""
    return _allreduce(
        [tensor], [new_output(tensor)], average, name, op, (prescale_factor, postscale_factor), process_set
    )


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce like `allreduce`, but overwrite and return the tensor. Not differentiable."""
    allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set).wait()
    return tensor


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an `allreduce_`; do not use the tensor before `synchronize`."""
    return _allreduce([tensor], [tensor], average, name, op, (prescale_factor, postscale_factor), process_set)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors as one operation that succeeds or fails as a whole. Differentiable.

    The tensors are packed into the same buffers in every run, so that results are reproducible. The other arguments
    are those of `allreduce`.
    """
    reduction = autograd.ReduceOptions(
        op=choose_op(average, op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        is_grouped=True,
        process_set=process_set,
    )
    return autograd.allreduce(tensors, name, compression, reduction)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a `grouped_allreduce`; `synchronize` returns its list of tensors. Not differentiable."""
    outputs = [new_output(tensor) for tensor in tensors]
    return _allreduce(
        tensors, outputs, average, name, op, (prescale_factor, postscale_factor), process_set, is_grouped=True
    )


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce like `grouped_allreduce`, but overwrite and return the tensors. Not differentiable."""
    grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set).wait()
    return list(tensors)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a `grouped_allreduce_`; do not use the tensors before `synchronize`."""
    return _allreduce(
        tensors, tensors, average, name, op, (prescale_factor, postscale_factor), process_set, is_grouped=True
    )


def _allreduce(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
    is_grouped: bool = False,
) -> Handle:
    """Submit an allreduce of the inputs into the outputs; `factors` are the prescale and the postscale factor."""
    return submit_allreduce(
        inputs,
        outputs,
        # With this stack level, the warning about `average` names the line that calls the asynchronous function.
        op=choose_op(average, op, stacklevel=4),
        name=choose_name(CollectiveKind.ALLREDUCE, name),
        prescale_factor=factors[0],
        postscale_factor=factors[1],
        is_grouped=is_grouped,
        process_set=process_set,
    )
