"""Allgather: every rank gets the tensors of all ranks, concatenated along the first dimension."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from datasvc.trainer.engine.execution.handles import Handle
from datasvc.trainer.engine.negotiation.requests import CollectiveKind
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set
from datasvc.trainer.job.submit import choose_name, submit_allgather
from datasvc.trainer.ops import autograd


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
