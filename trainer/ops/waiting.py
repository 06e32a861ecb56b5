"""Functions that wait: for an asynchronous operation, at a barrier, or for the ranks that have more data (`join`)."""

from __future__ import annotations

from datasvc.trainer.engine.execution.handles import Handle, Result
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set
from datasvc.trainer.job.submit import restart_names, submit_barrier, submit_join


def poll(handle: Handle) -> bool:
    """Return whether an operation has finished; if so, `synchronize` does not block."""
    return handle.is_finished()


def synchronize(handle: Handle) -> Result:
    """Wait for an asynchronous operation and return its result.

    Returns:
        A tensor; a list of tensors for a group; (tensor, received_splits) for an alltoall with splits.
    """
    return handle.wait()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set has called this function. Other operations may be in flight."""
    submit_barrier(process_set).wait()


def join(device: int = -1) -> int:  # noqa: ARG001 - Horovod's signature
    """Wait until all ranks have joined; a rank joins when it has no more data.

    Until then, this rank takes part in the allreduces of the others with neutral values: zeros, or the neutral
    element of Min, Max and Product. An Average still divides by the number of all ranks. Operations other than
    allreduce and barrier fail on the ranks that call them. After the join, the numbering of unnamed operations
    restarts on all ranks.

    Args:
        device: ignored; the neutral values are created on the device of the other ranks' tensors.

    Returns:
        The rank that joined last, the same on all ranks.
    """
    last = submit_join().wait()
    assert isinstance(last, int)
    # Ranks that joined early have counted fewer unnamed operations than the others, so all ranks start again at 1.
    restart_names()
    return last
