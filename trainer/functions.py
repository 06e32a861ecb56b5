"""Horovod's module of functions on state: the names of ``horovod.torch.functions``, defined in ``state``."""

from datasvc.trainer.optim.broadcast_state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
