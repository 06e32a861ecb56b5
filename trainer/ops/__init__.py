"""The collective operations, with Horovod's signatures.

The synchronous operations that return new tensors are differentiable. Every rank of a process set submits an
operation once under the same name; operations of different names may be submitted in any order. All operations have
the following arguments and errors:

Args:
    name: name that identifies the operation on all ranks. Calls without a name are numbered per process set, so they
        must be made in the same order on its ranks.
    process_set: ranks that take part, by default all. A root rank is always a global rank, not a rank in the set.

Raises:
    ValueError: the trainer is not initialized; the name is still in flight on this rank; this rank is not in the
        process set; an argument is invalid, whatever the other ranks submit.
    HorovodInternalError: ranks disagree on shape, dtype, reduction, root, factors or device, or a rank is lost.
        Raised by the synchronous operations and by `synchronize`.
"""

from __future__ import annotations

from datasvc.trainer.ops.autograd import Adasum, Average, Max, Min, Product, Sum
from datasvc.trainer.ops.collectives import (
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
    join,
    poll,
    synchronize,
)
from datasvc.trainer.ops.reduce_scatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
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
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]
