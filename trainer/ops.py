"""The collectives as users call them, with Horovod's order of arguments.

Gradients flow through the synchronous, out-of-place ones.

Every rank calls an operation once under the same name, in any order among names. Common to all:

Args:
    name: the key among ranks; without one, unnamed calls are counted and must come in the same order on all
        ranks.

Raises:
    ValueError: not initialized; the name is still in flight on this rank; an argument no rank could use.
    HorovodInternalError: ranks disagree on shape, dtype, reduction, root, factors or device, or a rank is
        lost. Raised by the synchronous calls and by ``synchronize``.
"""

import warnings
from collections.abc import Sequence

from torch import Tensor

from trainer import autograd
from trainer.engine.handles import Handle, Result
from trainer.engine.requests import Kind, ReduceOp
from trainer.submit import (
    choose_name,
    new_output,
    submit_allgather,
    submit_allreduce,
    submit_barrier,
    submit_broadcast,
)

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Combines the tensor over the ranks into a new one. Differentiable.

    Args:
        tensor: the same shape and dtype on every rank.
        average: deprecated; True is ``op=Average``, False is ``op=Sum``.
        name: see the module.
        op: Average if not given. Integers are averaged in float64 and truncated toward zero.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.
    """
    chosen, full_name = _choose_op(average, op), choose_name(Kind.ALLREDUCE, name)
    factors = (prescale_factor, postscale_factor)
    return autograd.allreduce([tensor], name=full_name, op=chosen, factors=factors, is_grouped=False)[0]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts an ``allreduce``; the tensor must not change until ``synchronize``. Not differentiable."""
    return _allreduce([tensor], [new_output(tensor)], average, name, op, prescale_factor, postscale_factor)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Like ``allreduce``, but overwrites and returns the tensor. Not differentiable."""
    return _tensor(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor))


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts an ``allreduce_``; the tensor must not be touched until ``synchronize``."""
    return _allreduce([tensor], [tensor], average, name, op, prescale_factor, postscale_factor)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    *,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduces all tensors as one operation with one name: all of them or none, packed alike in every run."""
    chosen, full_name = _choose_op(average, op), choose_name(Kind.ALLREDUCE, name)
    factors = (prescale_factor, postscale_factor)
    return autograd.allreduce(tensors, name=full_name, op=chosen, factors=factors, is_grouped=True)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts a ``grouped_allreduce``; ``synchronize`` returns the list. Not differentiable."""
    outputs = [new_output(tensor) for tensor in tensors]
    return _allreduce(tensors, outputs, average, name, op, prescale_factor, postscale_factor, is_grouped=True)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Like ``grouped_allreduce``, but overwrites and returns the tensors. Not differentiable."""
    result = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor).wait()
    assert isinstance(result, list)
    return result


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts a ``grouped_allreduce_``."""
    return _allreduce(tensors, tensors, average, name, op, prescale_factor, postscale_factor, is_grouped=True)


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """Concatenates the ranks' tensors in rank order. Differentiable: own rows of the averaged gradient.

    Args:
        tensor: one dimension or more; the first may differ between ranks, the others not.
        name: see the module.
    """
    return autograd.allgather(tensor, name=choose_name(Kind.ALLGATHER, name))


def allgather_async(tensor: Tensor, name: str | None = None) -> Handle:
    """Starts an ``allgather``; the tensor must not change until ``synchronize``. Not differentiable."""
    return submit_allgather(tensor, name=choose_name(Kind.ALLGATHER, name))


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """The root's tensor, in a new one. Differentiable: the root gets the averaged gradient, others zeros.

    Args:
        tensor: the same shape and dtype on every rank.
        root_rank: the same on every rank.
        name: see the module.
    """
    return autograd.broadcast(tensor, root_rank, name=choose_name(Kind.BROADCAST, name))


def broadcast_async(tensor: Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Starts a ``broadcast``; the tensor must not change until ``synchronize``. Not differentiable."""
    return submit_broadcast(tensor, new_output(tensor), root_rank, name=choose_name(Kind.BROADCAST, name))


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Overwrites the tensor with the root's and returns it. Not differentiable."""
    return _tensor(broadcast_async_(tensor, root_rank, name))


def broadcast_async_(tensor: Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Starts a ``broadcast_``; the tensor must not be touched until ``synchronize``."""
    return submit_broadcast(tensor, tensor, root_rank, name=choose_name(Kind.BROADCAST, name))


def barrier() -> None:
    """Returns when every rank has called it, whatever else is in flight."""
    submit_barrier().wait()


def poll(handle: Handle) -> bool:
    """Whether ``synchronize`` would not block."""
    return handle.is_finished()


def synchronize(handle: Handle) -> Result:
    """Waits for an asynchronous operation and returns its tensor, or list of tensors for a group."""
    return handle.wait()


def _allreduce(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    prescale_factor: float,
    postscale_factor: float,
    is_grouped: bool = False,
) -> Handle:
    return submit_allreduce(
        inputs,
        outputs,
        op=_choose_op(average, op),
        name=choose_name(Kind.ALLREDUCE, name),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        is_grouped=is_grouped,
    )


def _choose_op(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("give either op or average, not both; average is deprecated")
    warnings.warn("average is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=4)
    return Average if average else Sum


def _tensor(handle: Handle) -> Tensor:
    result = handle.wait()
    assert isinstance(result, Tensor)
    return result
