"""Waiting: for an operation, and for the other ranks."""

from datasvc.trainer.engine.execution.handles import Handle, Result
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set
from datasvc.trainer.job.submit import restart_names, submit_barrier, submit_join


def poll(handle: Handle) -> bool:
    """Whether ``synchronize`` would not block."""
    return handle.is_finished()


def synchronize(handle: Handle) -> Result:
    """Waits for an asynchronous operation.

    Returns:
        Its tensor; a list of tensors for a group; (tensor, received_splits) for an alltoall with splits.
    """
    return handle.wait()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the set has called it, whatever else is in flight."""
    submit_barrier(process_set).wait()


def join(device: int = -1) -> int:  # noqa: ARG001 - Horovod's signature
    """Waits for ranks that still have data to train on: until all have joined.

    Meanwhile this rank takes part in their allreduces with values that change nothing: zeros, or for Min, Max and
    Product the neutral element. An Average still divides by the number of all ranks. Other operations fail on the
    ranks that call them. Names made by counting begin anew on all ranks afterwards.

    Args:
        device: not needed here: zeros lie where the others' tensors do.

    Returns:
        The rank that joined last, the same on all ranks.
    """
    last = submit_join().wait()
    assert isinstance(last, int)
    restart_names()
    return last
