"""The public names of `horovod.torch.functions`, defined in `datasvc.trainer.optim.broadcast_state`."""

from __future__ import annotations

from datasvc.trainer.optim.broadcast_state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
