"""Allreduce of sparse tensors. Indices may differ between ranks, so every rank gathers all tensors and adds them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from datasvc.trainer.engine.negotiation.requests import CollectiveKind, ReduceOp
from datasvc.trainer.gradients.gradient_bucket import GradientReduction
from datasvc.trainer.gradients.sparse_gather import combine_gathered, gather_sparse
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set
from datasvc.trainer.job.submit import choose_name
from datasvc.trainer.ops.reductions import Average, Sum


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
