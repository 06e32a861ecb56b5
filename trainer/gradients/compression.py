"""Compressors of tensors for communication: no compression, 16-bit types, and access to top-k and PowerSGD.

They are values of the argument `compression` of `DistributedOptimizer` and of the operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from datasvc.trainer.engine.execution.handles import Handle
from datasvc.trainer.engine.negotiation.requests import ReduceOp
from datasvc.trainer.gradients.compression_with_memory import RESIDUAL, CompressionWithMemory, Memory, with_residual
from datasvc.trainer.gradients.gradient_bucket import Bucket, GradientReduction
from datasvc.trainer.gradients.power_sgd import PowerSGD
from datasvc.trainer.job.process_sets import members_of
from datasvc.trainer.job.submit import submit_allgather

# See Aji and Heafield 2017; error feedback as in Stich et al. 2018 and Karimireddy et al. 2019.


@dataclass(frozen=True)
class TopK(CompressionWithMemory):
    """Compression that sends, for each parameter, the gradient values of largest magnitude and their indices.

    Traffic grows with the number of ranks: each rank receives a fraction `ratio * size()` of the values, with an
    index of 4 bytes for each. A step fails if a rank has joined (it has no more data), because such a rank
    does not take part in the allgather that this compression uses.

    Args:
        ratio: fraction of the values of a parameter to send; at least one value is sent.

    Raises:
        ValueError: `ratio` is not above 0, or is above 1.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio <= 1.0:
            raise ValueError(f"the ratio of top-k must be above 0 and at most 1, not {self.ratio}")

    def make_bucket(
        self, name: str, parameters: Mapping[int, Tensor], reduction: GradientReduction, memory: Memory
    ) -> Bucket:
        """Return a bucket that sends the largest values of the gradients instead of the gradients."""
        return _TopKBucket(name, parameters, reduction, memory, self.ratio)


def take_largest(tensor: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    """Return the values of largest magnitude of a contiguous tensor, and set them to zero in the tensor.

    Returns:
        Values, and their indices in the flattened tensor: int64[max(1, ceil(ratio * numel))]; both empty for an empty
        tensor.
    """
    flat = tensor.view(-1)
    num_values = min(flat.numel(), max(1, math.ceil(ratio * flat.numel())))
    indices = torch.topk(flat.abs(), num_values, sorted=False).indices
    values = flat[indices]
    flat[indices] = 0
    return values, indices


class _TopKBucket(Bucket):
    """A bucket that gathers the chosen values of all ranks, with their indices in the concatenated parameters."""

    def __init__(
        self, name: str, parameters: Mapping[int, Tensor], reduction: GradientReduction, memory: Memory, ratio: float
    ) -> None:
        super().__init__(name, parameters, reduction)
        self._memory = memory
        self._ratio = ratio
        # By position of the parameter: the chosen values, and their indices in the flattened parameter.
        self._chosen: dict[int, tuple[Tensor, Tensor]] = {}

    def collect(self) -> None:
        values, indices = self._wait()
        assert self._handle is not None
        num_values = list(self._handle.gathered_rows[0])  # from each rank
        parameters = self.parameters.values()
        first = next(iter(parameters))
        flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        # Add the values rank by rank. No index occurs twice within a rank, so the order of additions is fixed, and
        # all ranks get the same bits.
        values_by_rank, indices_by_rank = torch.split(values, num_values), torch.split(indices, num_values)
        for rank_values, rank_indices in zip(values_by_rank, indices_by_rank, strict=True):
            flat.index_add_(0, rank_indices, rank_values)
        if self.reduction.op is ReduceOp.AVERAGE:
            flat /= len(members_of(self.reduction.process_set))
        parts = torch.split(flat, [parameter.numel() for parameter in parameters])
        for (position, parameter), part in zip(self.parameters.items(), parts, strict=True):
            self._assign(position, part.view(parameter.shape))

    def drop(self) -> None:
        super().drop()
        self._chosen.clear()

    def _take(self, position: int) -> None:
        memory = self._memory.setdefault(position, {})
        residual = with_residual(self.parameters[position], memory).contiguous()
        # `take_largest` removes the sent values, so `residual` then is the unsent part of the gradient.
        self._chosen[position] = take_largest(residual, self._ratio)
        memory[RESIDUAL] = residual

    def _send(self) -> Handle:
        values, indices, offset = [], [], 0
        for position, parameter in self.parameters.items():
            parameter_values, parameter_indices = self._chosen[position]
            values.append(parameter_values)
            indices.append(parameter_indices + offset)
            offset += parameter.numel()
        # An index is below the length of the concatenated parameters, so four bytes are enough for most buckets.
        dtype = torch.int32 if offset < 2**31 else torch.int64
        return submit_allgather(
            [torch.cat(values), torch.cat(indices).to(dtype)],
            name=self.name,
            is_grouped=True,
            process_set=self.reduction.process_set,
        )


class Compressor:
    """Base class of all compressors, including a user's own: a subclass, or an instance of one that has settings.

    The methods of this class return tensors unchanged.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and the context for `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:  # noqa: ARG004 - subclasses use it
        """Return a received tensor, decompressed. `context` is the value that `compress` returned on this rank."""
        return tensor


class NoneCompressor(Compressor):
    """No compression."""


class _As16Bits(Compressor):
    """Conversion of floating-point tensors to the 16-bit type `dtype`; other tensors are sent unchanged."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """Convert a floating-point tensor to 16 bits; the context is its original dtype."""
        if not tensor.dtype.is_floating_point:
            return tensor, None  # integers would lose digits
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Tensor, context: Any) -> Tensor:
        """Convert a tensor back to its original dtype."""
        return tensor if context is None else tensor.to(context)


class FP16Compressor(_As16Bits):
    """Compression of floating-point tensors to float16: values above 65,504 become infinite."""

    dtype = torch.float16


class BF16Compressor(_As16Bits):
    """Compression of floating-point tensors to bfloat16: the range of float32 with 8 bits of precision."""

    dtype = torch.bfloat16


class Compression:
    """The compressors under Horovod's names; `topk` and `powersgd` are additions, for `DistributedOptimizer` only."""

    none: Final = NoneCompressor
    fp16: Final = FP16Compressor
    bf16: Final = BF16Compressor
    topk: Final = TopK
    powersgd: Final = PowerSGD
