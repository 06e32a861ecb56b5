"""Reducescatter: the tensors of all ranks are reduced, and every rank gets some of the rows of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from datasvc.trainer.engine.execution.handles import Handle
from datasvc.trainer.engine.negotiation.requests import CollectiveKind, ReduceOp
from datasvc.trainer.gradients.compression import Compression, Compressor
from datasvc.trainer.gradients.gradient_bucket import GradientReduction
from datasvc.trainer.gradients.single_gradients import combine_gathered, gather_sparse
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set
from datasvc.trainer.job.submit import choose_name, submit_reducescatter
from datasvc.trainer.ops import autograd
from datasvc.trainer.ops.autograd import Average, Sum


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce the tensor over the ranks, and return the rows of this rank. Differentiable.

    Args:
        tensor: tensor with at least one dimension, of the same shape and dtype on every rank. The rows are divided
            evenly; the first `rows % size` ranks get one row more than the others.
        name: name of the operation, the same on all ranks; None to number it in the order of calls.
        compression: encoding of the values that are sent.
        op: reduction, Average or Sum.
        process_set: ranks that take part, by default all.
        prescale_factor: factor for each tensor before the reduction.
        postscale_factor: factor for the result of the reduction.

    Raises:
        ValueError: `tensor` has no dimensions.
        RuntimeError: `op` is neither Average nor Sum.
        OverflowError: a sum of integers does not fit their dtype; on every rank.
    """
    reduction = autograd.ReduceOptions(
        op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor, process_set=process_set
    )
    return autograd.reducescatter([tensor], name, compression, reduction)[0]


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `reducescatter`; do not change the tensor before `synchronize`. Not differentiable."""
    return submit_reducescatter(
        [tensor],
        name=choose_name(CollectiveKind.REDUCESCATTER, name),
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce and scatter several tensors as one operation that succeeds or fails as a whole. Differentiable.

    The other arguments and the errors are those of `reducescatter`.
    """
    reduction = autograd.ReduceOptions(
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        is_grouped=True,
        process_set=process_set,
    )
    return autograd.reducescatter(tensors, name, compression, reduction)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `grouped_reducescatter`; `synchronize` returns its list of tensors. Not differentiable."""
    return submit_reducescatter(
        tensors,
        name=choose_name(CollectiveKind.REDUCESCATTER, name),
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        is_grouped=True,
        process_set=process_set,
    )


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start an allreduce of sparse COO tensors: gather the indices and values of all ranks. Not differentiable.

    Args:
        tensor: sparse tensor of the same shape, dtype and number of sparse dimensions on every rank; the number of
            values may differ.
        name: name of the operation, the same on all ranks; None to number it in the order of calls.
        op: reduction, Average or Sum.
        process_set: ranks that take part, by default all.

    Returns:
        A function that waits for the operation and returns the reduced tensor, coalesced.

    Raises:
        ValueError: `tensor` is dense, or `op` is neither Average nor Sum.
    """
    if not tensor.is_sparse:
        raise ValueError(f"'{name}': sparse_allreduce_async needs a sparse COO tensor, not {tensor.layout}")
    # Only the stored values are gathered and added; the other reductions would need the zeros too.
    if op not in (Average, Sum):
        raise ValueError(f"'{name}': sparse_allreduce_async supports Average and Sum, not {op.value}")
    reduction = GradientReduction(op=op, process_set=process_set)
    handle = gather_sparse(tensor, name=choose_name(CollectiveKind.ALLREDUCE, name), process_set=process_set)
    return lambda: combine_gathered(handle, tensor.shape, reduction)
