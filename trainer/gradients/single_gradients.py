"""Buckets whose gradients are separate tensors: sparse gradients, and gradients that a custom compressor encodes.

The gradients of a `DenseBucket`, in contrast, are views of one flat tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from datasvc.trainer.engine.execution.handles import Handle
from datasvc.trainer.engine.negotiation.requests import ReduceOp
from datasvc.trainer.gradients.compression import Compressor
from datasvc.trainer.gradients.gradient_bucket import Bucket, GradientReduction
from datasvc.trainer.job.process_sets import ProcessSet, members_of
from datasvc.trainer.job.submit import submit_allgather, submit_allreduce


class SparseGradient(Bucket):
    """A bucket of one parameter with sparse gradients; it gathers the indices and values of all ranks."""

    def collect(self) -> None:
        """Wait for the indices and values of all ranks, add them, and store the sum or average in `grad`."""
        assert self._handle is not None
        ((position, parameter),) = self.parameters.items()
        self._assign(position, combine_gathered(self._handle, parameter.shape, self.reduction))

    def _take(self, position: int) -> None:
        pass  # `_send` reads the gradient itself

    def _send(self) -> Handle:
        (parameter,) = self.parameters.values()
        gradient = parameter.grad
        if gradient is None or not gradient.is_sparse:
            # A missing gradient is sent as an empty sparse tensor. A dense gradient does not come from the model:
            # `broadcast_optimizer_state` sets it to zeros before the first step.
            gradient = empty_sparse_like(parameter) if gradient is None else gradient.to_sparse(1)
        return gather_sparse(gradient, name=self.name, process_set=self.reduction.process_set)


class CompressedBucket(Bucket):
    """A bucket of separately compressed gradients, which are sent as one operation."""

    def __init__(
        self,
        name: str,
        parameters: Mapping[int, Tensor],
        reduction: GradientReduction,
        compression: type[Compressor] | Compressor,
    ) -> None:
        super().__init__(name, parameters, reduction)
        self._compression = compression
        # By position: the compressed gradient, and the context for its decompression.
        self._compressed: dict[int, tuple[Tensor, Any]] = {}

    def collect(self) -> None:
        """Wait for the operation, and store the decompressed gradients in `grad`."""
        self._wait()
        for position in self.parameters:
            self._assign(position, self._compression.decompress(*self._compressed[position]))

    def drop(self) -> None:
        """Wait for the operation in flight, and discard its result and the compressed gradients."""
        super().drop()
        self._compressed.clear()

    def _take(self, position: int) -> None:
        parameter = self.parameters[position]
        gradient = parameter.new_zeros(parameter.shape) if parameter.grad is None else parameter.grad
        self._compressed[position] = self._compression.compress(gradient.detach())

    def _send(self) -> Handle:
        prescale, postscale = self.reduction.factors()
        # Send in the order of the bucket, because it is equal on all ranks; gradients may complete in other orders.
        tensors = [self._compressed[position][0] for position in self.parameters]
        return submit_allreduce(
            tensors,
            tensors,  # reduced in place
            name=self.name,
            op=self.reduction.op_on_wire,
            prescale_factor=prescale,
            postscale_factor=postscale,
            is_grouped=True,
            process_set=self.reduction.process_set,
        )


def gather_sparse(tensor: Tensor, *, name: str, process_set: ProcessSet) -> Handle:
    """Start to gather a sparse COO tensor; `combine_gathered` returns the result."""
    # Coalesce, so that an index that occurs twice on this rank is sent once.
    compact = tensor.detach().coalesce()
    return submit_allgather(
        # Transpose the indices to int64[values, dimensions]: an allgather concatenates along the first dimension.
        [compact.indices().t().contiguous(), compact.values()],
        name=name,
        is_grouped=True,
        process_set=process_set,
    )


def combine_gathered(handle: Handle, shape: torch.Size, reduction: GradientReduction) -> Tensor:
    """Wait for the result of `gather_sparse`, and combine the tensors of the ranks.

    Args:
        handle: handle from `gather_sparse`.
        shape: shape of the dense tensor.
        reduction: Average or Sum, and the ranks.

    Returns:
        A coalesced sparse tensor of this shape.
    """
    gathered = handle.wait()
    assert isinstance(gathered, list)
    indices, values = gathered
    if reduction.op is ReduceOp.AVERAGE:
        values = values / len(members_of(reduction.process_set))
    # `coalesce` adds values of the same index. Every rank has them in rank order, so all ranks get the same bits.
    return torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=False).coalesce()


def empty_sparse_like(parameter: Tensor) -> Tensor:
    """Return an empty sparse tensor whose values are rows of the parameter, as in the gradient of an embedding."""
    indices = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.zeros((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
