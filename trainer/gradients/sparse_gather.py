"""Reduction of sparse tensors by gathering and adding, for sparse gradients and `sparse_allreduce_async`."""

from __future__ import annotations

import torch
from torch import Tensor

from datasvc.trainer.engine.execution.handles import Handle
from datasvc.trainer.engine.negotiation.requests import ReduceOp
from datasvc.trainer.gradients.gradient_bucket import GradientReduction
from datasvc.trainer.job.process_sets import ProcessSet, members_of
from datasvc.trainer.job.submit import submit_allgather


def gather_sparse(tensor: Tensor, *, name: str, process_set: ProcessSet) -> Handle:
    """Start to gather a sparse COO tensor; `combine_gathered` returns the result."""
    # Coalesce, so that an index that occurs twice on this rank is sent once.
    compact = tensor.detach().coalesce()
    return submit_allgather(
        # Transpose the indices to int64[values, dimensions]: an allgather concatenates along the first dimension.
        [compact.indices().t().contiguous(), compact.values()],
        name=name,
        is_grouped=True,
        process_set=process_set,
    )


def combine_gathered(handle: Handle, shape: torch.Size, reduction: GradientReduction) -> Tensor:
    """Wait for the result of `gather_sparse`, and combine the tensors of the ranks.

    Args:
        handle: handle from `gather_sparse`.
        shape: shape of the dense tensor.
        reduction: Average or Sum, and the ranks.

    Returns:
        A coalesced sparse tensor of this shape.
    """
    gathered = handle.wait()
    assert isinstance(gathered, list)
    indices, values = gathered
    if reduction.op is ReduceOp.AVERAGE:
        values = values / len(members_of(reduction.process_set))
    # `coalesce` adds values of the same index. Every rank has them in rank order, so all ranks get the same bits.
    return torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=False).coalesce()


def empty_sparse_like(parameter: Tensor) -> Tensor:
    """Return an empty sparse tensor whose values are rows of the parameter, as in the gradient of an embedding."""
    indices = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.zeros((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
