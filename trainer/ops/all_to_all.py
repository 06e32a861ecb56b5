"""Every rank sends rows to every rank."""

from collections.abc import Sequence

import torch
from torch import Tensor

from datasvc.trainer.engine.execution.handles import Handle, Result
from datasvc.trainer.engine.negotiation.requests import CollectiveKind
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set
from datasvc.trainer.job.submit import choose_name, submit_alltoall
from datasvc.trainer.ops import autograd


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Deals the tensor's rows to the ranks, and returns what they dealt to this one. Differentiable.

    Args:
        tensor: one dimension or more; the first may differ between ranks, the others not.
        splits: int32[size], rows for each rank, in rank order; without it all get equal parts.
        name: see the package.
        process_set: see the package.

    Returns:
        The rows that came, in rank order. With ``splits`` also how many came from each rank, int32[size], on the
        device of ``splits``.

    Raises:
        ValueError: splits that are not int32, not one for each rank, or more than there are rows; without them, rows
            that cannot be divided by the number of ranks.
    """
    output, received = autograd.alltoall(
        tensor, splits, name=choose_name(CollectiveKind.ALLTOALL, name), process_set=process_set
    )
    if splits is None:
        return output
    return output, received.to(splits.device) if isinstance(splits, Tensor) else received


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts an ``alltoall``; the tensor must not change until ``synchronize``. Not differentiable."""
    handle = submit_alltoall(tensor, splits, name=choose_name(CollectiveKind.ALLTOALL, name), process_set=process_set)
    if splits is not None:
        handle.present = lambda result: _with_splits(result, handle.received_splits, splits)
    return handle


def _with_splits(result: Result, received: tuple[int, ...], splits: Tensor | Sequence[int]) -> Result:
    assert isinstance(result, Tensor)
    device = splits.device if isinstance(splits, Tensor) else None
    return result, torch.tensor(received, dtype=torch.int32, device=device)
