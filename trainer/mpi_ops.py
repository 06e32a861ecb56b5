"""The public names of `horovod.torch.mpi_ops`, which are looked up in `datasvc.trainer` when they are used.

A type checker sees them as `Any`. Import them from `datasvc.trainer` to get their types.
"""

from __future__ import annotations

from typing import Any

from datasvc import trainer
from datasvc.trainer import ops
from datasvc.trainer.common import util

# Names of `datasvc.trainer` that Horovod defines in other modules, or does not have.
_NOT_IN_MPI_OPS = frozenset(
    {
        "DistributedOptimizer",
        "EngineSettings",
        "SyncBatchNorm",
        "allgather_object",
        "broadcast_object",
        "broadcast_optimizer_state",
        "broadcast_parameters",
        "process_set_table",
        "run",
    }
)
_FROM_TRAINER = frozenset(trainer.__all__) - _NOT_IN_MPI_OPS

gpu_available = util.gpu_available
handle_average_backwards_compatibility = util.get_average_backwards_compatibility_fun(ops)
num_rank_is_power_2 = util.num_rank_is_power_2

__all__ = sorted(  # noqa: PLE0605 - it is a list
    {*_FROM_TRAINER, "gpu_available", "handle_average_backwards_compatibility", "num_rank_is_power_2"}
)


def __getattr__(name: str) -> Any:
    if name not in _FROM_TRAINER:
        raise AttributeError(f"module 'datasvc.trainer.mpi_ops' has no attribute {name!r}")
    return getattr(trainer, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
