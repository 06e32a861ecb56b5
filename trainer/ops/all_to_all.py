"""Alltoall: every rank sends some of its rows to every rank."""

from __future__ import annotations

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
    """Send rows of the tensor to each rank, and return the rows received from each rank. Differentiable.

    Args:
        tensor: tensor with at least one dimension; only the first dimension may differ between ranks.
        splits: int32[size], number of rows for each rank, in rank order; None for equal parts.
        name: name of the operation, the same on all ranks; None to number it in the order of calls.
        process_set: ranks that take part, by default all.

    Returns:
        The received rows, in rank order. With `splits`, also the number of rows received from each rank, int32[size],
        on the device of `splits`.

    Raises:
        ValueError: `splits` is not int32, does not have one number for each rank, or has a larger sum than there are
            rows; without `splits`, the number of rows is not divisible by the number of ranks.
    """
    output, received = autograd.alltoall(tensor, splits, name, process_set)
    # As in Horovod, only a caller that gave splits gets the numbers of received rows.
    if splits is None:
        return output
    return output, received.to(splits.device) if isinstance(splits, Tensor) else received


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an `alltoall`; do not change the tensor before `synchronize` returns the result. Not differentiable."""
    handle = submit_alltoall(tensor, splits, name=choose_name(CollectiveKind.ALLTOALL, name), process_set=process_set)
    if splits is not None:
        # Only the finished operation has the numbers of received rows, so `synchronize` adds them to its result.
        handle.present = lambda result: _with_splits(result, handle.received_splits, splits)
    return handle


def _with_splits(result: Result, received: tuple[int, ...], splits: Tensor | Sequence[int]) -> Result:
    """Return the received rows and their numbers, as `alltoall` does."""
    assert isinstance(result, Tensor)
    device = splits.device if isinstance(splits, Tensor) else None
    return result, torch.tensor(received, dtype=torch.int32, device=device)
