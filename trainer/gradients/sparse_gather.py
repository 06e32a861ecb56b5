"""A sum of sparse tensors over ranks: the indices and values of all, put together."""

from __future__ import annotations

import torch
from torch import Tensor

from datasvc.trainer.engine.execution.handles import Handle
from datasvc.trainer.engine.negotiation.requests import ReduceOp
from datasvc.trainer.gradients.gradient_bucket import GradientReduction
from datasvc.trainer.job.process_sets import ProcessSet, members_of
from datasvc.trainer.job.submit import submit_allgather


def gather_sparse(tensor: Tensor, *, name: str, process_set: ProcessSet) -> Handle:
    """Starts to gather a sparse COO tensor; see `put_together`."""
    compact = tensor.detach().coalesce()
    return submit_allgather(
        [compact.indices().t().contiguous(), compact.values()],
        name=name,
        is_grouped=True,
        process_set=process_set,
    )


def put_together(handle: Handle, shape: torch.Size, reduction: GradientReduction) -> Tensor:
    """The combined tensor, coalesced.

    Args:
        handle: of `gather_sparse`.
        shape: of the tensor, the same on every rank.
        reduction: Average or Sum.
    """
    gathered = handle.wait()
    assert isinstance(gathered, list)
    indices, values = gathered
    if reduction.op is ReduceOp.AVERAGE:
        values = values / len(members_of(reduction.process_set))
    # Every rank adds in rank order, so all have the same bits.
    return torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=False).coalesce()


def without_values(parameter: Tensor) -> Tensor:
    """A sparse tensor of zeros with rows of the parameter as its values, as embeddings have them."""
    indices = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.zeros((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
