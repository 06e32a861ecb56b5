"""Every rank gets the root's tensor."""

from torch import Tensor

from datasvc.trainer.engine.execution.handles import Handle
from datasvc.trainer.engine.negotiation.requests import CollectiveKind
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set
from datasvc.trainer.job.submit import choose_name, new_output, submit_broadcast
from datasvc.trainer.ops import autograd


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's tensor, in a new one. Differentiable: the root gets the averaged gradient, others zeros.

    Args:
        tensor: the same shape and dtype on every rank.
        root_rank: global rank, the same on every rank.
        name: see the package.
        process_set: see the package.
    """
    return autograd.broadcast(
        tensor, root_rank, name=choose_name(CollectiveKind.BROADCAST, name), process_set=process_set
    )


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Starts a ``broadcast``; the tensor must not change until ``synchronize``. Not differentiable."""
    full_name = choose_name(CollectiveKind.BROADCAST, name)
    return submit_broadcast(tensor, new_output(tensor), root_rank, name=full_name, process_set=process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrites the tensor with the root's and returns it. Not differentiable."""
    broadcast_async_(tensor, root_rank, name, process_set).wait()
    return tensor


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Starts a ``broadcast_``; the tensor must not be touched until ``synchronize``."""
    full_name = choose_name(CollectiveKind.BROADCAST, name)
    return submit_broadcast(tensor, tensor, root_rank, name=full_name, process_set=process_set)
