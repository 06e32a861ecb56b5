"""Every rank gets what sparse tensors add up to."""

from collections.abc import Callable

from torch import Tensor

from datasvc.trainer.engine.negotiation.requests import CollectiveKind, ReduceOp
from datasvc.trainer.gradients.gradient_bucket import GradientReduction
from datasvc.trainer.gradients.sparse_gather import gather_sparse, put_together
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set
from datasvc.trainer.job.submit import choose_name
from datasvc.trainer.ops.reductions import Average, Sum


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Starts to combine sparse COO tensors: the indices and values of all ranks are gathered. Not differentiable.

    Args:
        tensor: sparse, of the same shape, dtype and number of sparse dimensions on every rank, with any number of
            values.
        name: see the package.
        op: Average or Sum.
        process_set: see the package.

    Returns:
        What waits, and returns the combined tensor, coalesced.

    Raises:
        ValueError: a dense tensor; another ``op``.
    """
    if not tensor.is_sparse:
        raise ValueError(f"'{name}': sparse_allreduce_async is for sparse COO tensors, not {tensor.layout}")
    if op not in (Average, Sum):
        raise ValueError(f"'{name}': sparse tensors know Average and Sum, not {op.value}")
    reduction = GradientReduction(op=op, process_set=process_set)
    handle = gather_sparse(tensor, name=choose_name(CollectiveKind.ALLREDUCE, name), process_set=process_set)
    return lambda: put_together(handle, tensor.shape, reduction)
