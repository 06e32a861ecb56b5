"""Every rank gets the rows of all."""

from collections.abc import Sequence

from torch import Tensor

from datasvc.trainer.engine.execution.handles import Handle
from datasvc.trainer.engine.negotiation.requests import CollectiveKind
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set
from datasvc.trainer.job.submit import choose_name, submit_allgather
from datasvc.trainer.ops import autograd


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenates the ranks' tensors in rank order. Differentiable: own rows of the averaged gradient.

    Args:
        tensor: one dimension or more; the first may differ between ranks, the others not.
        name: see the package.
        process_set: see the package.
    """
    full_name = choose_name(CollectiveKind.ALLGATHER, name)
    return autograd.allgather([tensor], name=full_name, is_grouped=False, process_set=process_set)[0]


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Starts an ``allgather``; the tensor must not change until ``synchronize``. Not differentiable."""
    return submit_allgather([tensor], name=choose_name(CollectiveKind.ALLGATHER, name), process_set=process_set)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Gathers all tensors as one operation with one name: all of them or none. Differentiable."""
    full_name = choose_name(CollectiveKind.ALLGATHER, name)
    return autograd.allgather(tensors, name=full_name, is_grouped=True, process_set=process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Starts a ``grouped_allgather``; ``synchronize`` returns the list. Not differentiable."""
    full_name = choose_name(CollectiveKind.ALLGATHER, name)
    return submit_allgather(tensors, name=full_name, is_grouped=True, process_set=process_set)
