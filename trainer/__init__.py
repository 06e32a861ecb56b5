"""Horovod's API for data-parallel training, on torch.distributed: `import datasvc.trainer as hvd`.

Importing the package does not import torch: the launcher does not need torch, and starts the ranks sooner without
it. Most names import torch when they are first used. The modules of `horovod.torch` that programs use exist here
under the same names, as do the packages `horovod.common` and `horovod.runner`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from datasvc.extras import explain_missing

if TYPE_CHECKING:
    from datasvc.trainer.env.environment import EngineSettings, smoke_steps
    from datasvc.trainer.errors import HorovodInternalError
    from datasvc.trainer.function import run
    from datasvc.trainer.gradients.compression import Compression
    from datasvc.trainer.job.capabilities import (
        ccl_built,
        cuda_built,
        ddl_built,
        gloo_built,
        gloo_enabled,
        mpi_built,
        mpi_enabled,
        mpi_threads_supported,
        nccl_built,
        rocm_built,
    )
    from datasvc.trainer.job.process_sets import (
        ProcessSet,
        add_process_set,
        global_process_set,
        process_set_table,
        remove_process_set,
    )
    from datasvc.trainer.job.runtime import (
        cross_rank,
        cross_size,
        init,
        is_homogeneous,
        is_initialized,
        local_rank,
        local_size,
        rank,
        shutdown,
        size,
        start_timeline,
        stop_timeline,
    )
    from datasvc.trainer.ops import (
        Adasum,
        Average,
        Max,
        Min,
        Product,
        Sum,
        allgather,
        allgather_async,
        allreduce,
        allreduce_,
        allreduce_async,
        allreduce_async_,
        alltoall,
        alltoall_async,
        barrier,
        broadcast,
        broadcast_,
        broadcast_async,
        broadcast_async_,
        grouped_allgather,
        grouped_allgather_async,
        grouped_allreduce,
        grouped_allreduce_,
        grouped_allreduce_async,
        grouped_allreduce_async_,
        grouped_reducescatter,
        grouped_reducescatter_async,
        join,
        poll,
        reducescatter,
        reducescatter_async,
        sparse_allreduce_async,
        synchronize,
    )
    from datasvc.trainer.optim.averaging import Averaging
    from datasvc.trainer.optim.broadcast_state import (
        allgather_object,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
    )
    from datasvc.trainer.optim.optimizer import DistributedOptimizer
    from datasvc.trainer.optim.sync_batch_norm import SyncBatchNorm

__version__ = "0.28.1"
"""The Horovod release whose API this package implements. Programs compare it with the releases that they need.

The version of this implementation is `datasvc.__version__`.
"""

__all__ = [
    "Adasum",
    "Average",
    "Averaging",
    "Compression",
    "DistributedOptimizer",
    "EngineSettings",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "process_set_table",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "smoke_steps",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

# `__getattr__` searches these modules for a name, in this order. The first three do not import torch, and a process
# that only calls `hvd.run` needs no others.
_MODULES = (
    "errors",
    "function",
    "env.environment",
    "job.runtime",
    "job.process_sets",
    "gradients.compression",
    "ops",
    "optim.averaging",
    "optim.broadcast_state",
    "optim.optimizer",
    "optim.sync_batch_norm",
    "job.capabilities",
)
# Modules that programs use as attributes of `horovod.torch`.
_PUBLIC_MODULES = (
    "common",
    "compression",
    "elastic",
    "functions",
    "mpi_ops",
    "optimizer",
    "runner",
    "sync_batch_norm",
)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC_MODULES:
        with explain_missing("datasvc.trainer"):
            return importlib.import_module(f"datasvc.trainer.{name}")
    if name in __all__:
        for module_name in _MODULES:
            with explain_missing("datasvc.trainer"):
                module = importlib.import_module(f"datasvc.trainer.{module_name}")
            if hasattr(module, name):
                # Store the value in the module: Python calls `__getattr__` only for names that the module lacks.
                value = globals()[name] = getattr(module, name)
                return value
    raise AttributeError(f"module 'datasvc.trainer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PUBLIC_MODULES})
