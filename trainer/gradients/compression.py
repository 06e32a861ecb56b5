"""Compressors of tensors for communication: no compression, 16-bit types, top-k, and access to the others.

They are values of the argument `compression` of `DistributedOptimizer` and of the operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from datasvc.trainer.engine.execution.handles import Handle
from datasvc.trainer.engine.negotiation.requests import ReduceOp
from datasvc.trainer.gradients.compression_with_memory import (
    NUM_STEPS,
    RESIDUAL,
    VELOCITY,
    CompressionWithMemory,
    Memory,
    count_step,
    drop_infinite,
    keep_residual,
    with_residual,
)
from datasvc.trainer.gradients.gradient_bucket import Bucket, GradientReduction, layout_of
from datasvc.trainer.gradients.power_sgd import PowerSGD
from datasvc.trainer.gradients.quantized import Quantized
from datasvc.trainer.job.process_sets import members_of
from datasvc.trainer.job.submit import submit_allgather

# See Aji and Heafield 2017; error feedback as in Stich et al. 2018 and Karimireddy et al. 2019.
_WARMUP_STAGES = 5  # as the epochs of warm-up of Lin et al. 2018


@dataclass(frozen=True)
class TopK(CompressionWithMemory):
    """Compression that sends, for each parameter, the gradient values of largest magnitude and their indices.

    Traffic grows with the number of ranks: each rank receives a fraction `ratio * size()` of the values, with an
    index of 4 bytes for each. A step fails if a rank has joined (it has no more data), because such a rank
    does not take part in the allgather that this compression uses.

    Args:
        ratio: fraction of the values of a parameter to send; at least one value is sent.
        warmup_steps: number of initial steps with larger fractions, in five stages: the fraction of stage i is
            `ratio ** (i / 5)`.

    Raises:
        ValueError: `ratio` is not above 0, or is above 1; `warmup_steps` is below 0.
    """

    ratio: float = 0.01
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio <= 1.0:
            raise ValueError(f"the ratio of top-k must be above 0 and at most 1, not {self.ratio}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, not {self.warmup_steps}")

    def ratio_at(self, step: int) -> float:
        """Return the fraction of values that a step sends; steps count from 0."""
        if step >= self.warmup_steps:
            return self.ratio
        return float(self.ratio ** ((1 + _WARMUP_STAGES * step // self.warmup_steps) / _WARMUP_STAGES))

    def make_bucket(
        self, name: str, parameters: Mapping[int, Tensor], reduction: GradientReduction, memory: Memory
    ) -> Bucket:
        """Return a bucket that sends the largest values of the gradients instead of the gradients."""
        return _TopKBucket(name, parameters, reduction, memory, self)

    def accumulate(self, parameter: Tensor, memory: dict[str, Any], num_ranks: int) -> Tensor:  # noqa: ARG002
        """Return a new contiguous tensor: what the rank has of a parameter to send, of this and of earlier steps."""
        return with_residual(parameter, memory).contiguous()

    def forget_sent(self, indices: Tensor, memory: dict[str, Any]) -> None:
        """Remove from the memory of a parameter what belongs to the sent values, whose indices are given."""


@dataclass(frozen=True)
class DeepGradientCompression(TopK):
    """Top-k of momentum instead of gradients (Lin et al. 2018); each rank has a momentum of its own.

    The optimizer must be SGD without momentum, because the momentum is applied here. The momentum of a sent value is
    set to zero (the paper's momentum factor masking).

    Args:
        ratio: as for `TopK`.
        warmup_steps: as for `TopK`.
        momentum: factor of the momentum, from 0 to below 1.
        clip_norm: maximum norm of a rank's gradient of a parameter, times the square root of the number of ranks;
            None: not clipped.

    Raises:
        ValueError: as for `TopK`; `momentum` or `clip_norm` is out of range.
    """

    has_momentum: ClassVar[bool] = True

    ratio: float = 0.001
    momentum: float = 0.9
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"the momentum must be at least 0 and below 1, not {self.momentum}")
        if self.clip_norm is not None and not self.clip_norm > 0.0:
            raise ValueError(f"clip_norm must be above 0, not {self.clip_norm}")

    def check(self, op: ReduceOp, optimizer: torch.optim.Optimizer) -> None:
        """Check the reduction, and that the optimizer has no momentum. Raises ValueError: it has one."""
        super().check(op, optimizer)
        if any(group.get("momentum") for group in optimizer.param_groups):
            raise ValueError("dgc applies the momentum itself; give it the momentum, and the optimizer momentum=0")

    def accumulate(self, parameter: Tensor, memory: dict[str, Any], num_ranks: int) -> Tensor:
        """Add the gradient to the rank's momentum, and return the sum of the momentum and the residual."""
        velocity = with_residual(parameter, {}).contiguous()
        if self.clip_norm is not None:
            # In float32, because the squares of numbers above 256 are infinite in float16.
            norm: Tensor = torch.linalg.vector_norm(velocity, dtype=torch.float32)
            velocity *= (self.clip_norm / math.sqrt(num_ranks) / norm.clamp_min(1e-30)).clamp_max(1.0)
        if VELOCITY in memory:
            velocity.add_(memory[VELOCITY], alpha=self.momentum)
        memory[VELOCITY] = velocity
        return velocity + memory[RESIDUAL] if RESIDUAL in memory else velocity.clone()

    def forget_sent(self, indices: Tensor, memory: dict[str, Any]) -> None:
        """Set the momentum of the sent values to zero."""
        drop_infinite(memory[VELOCITY]).view(-1)[indices] = 0


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
        self,
        name: str,
        parameters: Mapping[int, Tensor],
        reduction: GradientReduction,
        memory: Memory,
        settings: TopK,
    ) -> None:
        super().__init__(name, parameters, reduction)
        self._memory = memory
        self._settings = settings
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
        num_ranks = len(members_of(self.reduction.process_set))
        residual = self._settings.accumulate(self.parameters[position], memory, num_ranks)
        # `take_largest` removes the sent values, so `residual` then is the unsent part of the gradient.
        self._chosen[position] = take_largest(residual, self._settings.ratio_at(memory.get(NUM_STEPS, 0)))
        keep_residual(memory, residual)
        self._settings.forget_sent(self._chosen[position][1], memory)
        if self._settings.warmup_steps:
            count_step(memory)

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
            layout=layout_of(self.parameters.values()),
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
    """The compressors under Horovod's names; those after `bf16` are additions, for `DistributedOptimizer` only."""

    none: Final = NoneCompressor
    fp16: Final = FP16Compressor
    bf16: Final = BF16Compressor
    topk: Final = TopK
    dgc: Final = DeepGradientCompression
    powersgd: Final = PowerSGD
    quantized: Final = Quantized
