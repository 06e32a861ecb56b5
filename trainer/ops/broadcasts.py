"""Broadcast: every rank gets the tensor of one rank, the root."""

from __future__ import annotations

from torch import Tensor

from datasvc.trainer.engine.execution.handles import Handle
from datasvc.trainer.engine.negotiation.requests import CollectiveKind
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set
from datasvc.trainer.job.submit import choose_name, new_output, submit_broadcast
from datasvc.trainer.ops import autograd


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
