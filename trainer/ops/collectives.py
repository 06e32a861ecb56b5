"""The collective operations: allreduce, allgather, alltoall, broadcast, barrier, join, and waiting for results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from datasvc.trainer.engine.execution.handles import Handle, Result
from datasvc.trainer.engine.negotiation.requests import CollectiveKind, ReduceOp
from datasvc.trainer.gradients.compression import Compression, Compressor
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set
from datasvc.trainer.job.submit import (
    choose_name,
    new_output,
    restart_names,
    submit_allgather,
    submit_allreduce,
    submit_alltoall,
    submit_barrier,
    submit_broadcast,
    submit_join,
)
from datasvc.trainer.ops import autograd
from datasvc.trainer.ops.autograd import choose_op


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


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the tensors of the ranks in rank order, into a new tensor.

    Differentiable: the gradient is averaged over the ranks, and each rank gets the part for the rows that it sent.

    Args:
        tensor: tensor with at least one dimension; only the first dimension may differ between ranks.
        name: name of the operation, the same on all ranks; None to number it in the order of calls.
        process_set: ranks that take part, by default all.
    """
    return autograd.allgather([tensor], name, process_set, is_grouped=False)[0]


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Start an `allgather`; do not change the tensor before `synchronize`. Not differentiable."""
    return submit_allgather([tensor], name=choose_name(CollectiveKind.ALLGATHER, name), process_set=process_set)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Gather several tensors as one operation that succeeds or fails as a whole. Differentiable like `allgather`."""
    return autograd.allgather(tensors, name, process_set, is_grouped=True)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a `grouped_allgather`; `synchronize` returns its list of tensors. Not differentiable."""
    full_name = choose_name(CollectiveKind.ALLGATHER, name)
    return submit_allgather(tensors, name=full_name, is_grouped=True, process_set=process_set)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows of the tensor to each rank, and return the rows received from each rank. Differentiable.

    Args:
        tensor: tensor with at least one dimension; only the first dimension may differ between ranks.
        splits: int32[size], number of rows for each rank, in rank order; None for equal parts.
        name: name of the operation, the same on all ranks; None to number it in the order of calls.
        process_set: ranks that take part, by default all.

    Returns:
        The received rows, in rank order. With `splits`, also the number of rows received from each rank, int32[size],
        on the device of `splits`.

    Raises:
        ValueError: `splits` is not int32, does not have one number for each rank, or has a larger sum than there are
            rows; without `splits`, the number of rows is not divisible by the number of ranks.
    """
    output, received = autograd.alltoall(tensor, splits, name, process_set)
    # As in Horovod, only a caller that gave splits gets the numbers of received rows.
    if splits is None:
        return output
    return output, received.to(splits.device) if isinstance(splits, Tensor) else received


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an `alltoall`; do not change the tensor before `synchronize` returns the result. Not differentiable."""
    handle = submit_alltoall(tensor, splits, name=choose_name(CollectiveKind.ALLTOALL, name), process_set=process_set)
    if splits is not None:
        # Only the finished operation has the numbers of received rows, so `synchronize` adds them to its result.
        handle.present = lambda result: _with_splits(result, handle.received_splits, splits)
    return handle


def _with_splits(result: Result, received: tuple[int, ...], splits: Tensor | Sequence[int]) -> Result:
    """Return the received rows and their numbers, as `alltoall` does."""
    assert isinstance(result, Tensor)
    device = splits.device if isinstance(splits, Tensor) else None
    return result, torch.tensor(received, dtype=torch.int32, device=device)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return a new tensor with the values of the root's tensor.

    Differentiable: the root gets the averaged gradient, the other ranks get zeros.

    Args:
        tensor: tensor of the same shape and dtype on every rank.
        root_rank: global rank of the root, the same on every rank.
        name: name of the operation, the same on all ranks; None to number it in the order of calls.
        process_set: ranks that take part, by default all.
    """
    return autograd.broadcast(tensor, root_rank, name, process_set)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a `broadcast`; do not change the tensor before `synchronize`. Not differentiable."""
    full_name = choose_name(CollectiveKind.BROADCAST, name)
    return submit_broadcast(tensor, new_output(tensor), root_rank, name=full_name, process_set=process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite the tensor with the root's tensor and return it. Not differentiable."""
    broadcast_async_(tensor, root_rank, name, process_set).wait()
    return tensor


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a `broadcast_`; do not use the tensor before `synchronize`."""
    full_name = choose_name(CollectiveKind.BROADCAST, name)
    return submit_broadcast(tensor, tensor, root_rank, name=full_name, process_set=process_set)


def poll(handle: Handle) -> bool:
    """Return whether an operation has finished; if so, `synchronize` does not block."""
    return handle.is_finished()


def synchronize(handle: Handle) -> Result:
    """Wait for an asynchronous operation and return its result.

    Returns:
        A tensor; a list of tensors for a group; (tensor, received_splits) for an alltoall with splits.
    """
    return handle.wait()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set has called this function. Other operations may be in flight."""
    submit_barrier(process_set).wait()


def join(device: int = -1) -> int:  # noqa: ARG001 - Horovod's signature
    """Wait until all ranks have joined; a rank joins when it has no more data.

    Until then, this rank takes part in the allreduces of the others with neutral values: zeros, or the neutral
    element of Min, Max and Product. An Average still divides by the number of all ranks. Operations other than
    allreduce and barrier fail on the ranks that call them. After the join, the numbering of unnamed operations
    restarts on all ranks.

    Args:
        device: ignored; the neutral values are created on the device of the other ranks' tensors.

    Returns:
        The rank that joined last, the same on all ranks.
    """
    last = submit_join().wait()
    assert isinstance(last, int)
    # Ranks that joined early have counted fewer unnamed operations than the others, so all ranks start again at 1.
    restart_names()
    return last
