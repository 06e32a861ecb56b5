"""Top-k sparsification with error feedback: the largest gradients travel, the others wait until they have grown.

Aji and Heafield 2017; error feedback as in Stich et al. 2018 and Karimireddy et al. 2019.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from datasvc.trainer.engine.execution.handles import Handle
from datasvc.trainer.engine.negotiation.requests import ReduceOp
from datasvc.trainer.gradients.compression_with_memory import RESIDUAL, CompressionWithMemory, Memory, with_residual
from datasvc.trainer.gradients.gradient_bucket import Bucket, GradientReduction
from datasvc.trainer.job.process_sets import members_of
from datasvc.trainer.job.submit import submit_allgather


@dataclass(frozen=True)
class TopK(CompressionWithMemory):
    """Each step, of each parameter the values that are largest in absolute value, and where they are.

    Traffic grows with the number of ranks: each receives `ratio * size()` of the values, with an index of 4 bytes
    each. Not with joined ranks, since values are gathered.

    Args:
        ratio: share of a parameter's values that travels; at least one value does.

    Raises:
        ValueError: not above 0, or above 1.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio <= 1.0:
            raise ValueError(f"the ratio of top-k must be above 0 and at most 1, not {self.ratio}")

    def make_bucket(
        self, name: str, parameters: Mapping[int, Tensor], reduction: GradientReduction, memory: Memory
    ) -> Bucket:
        """See `CompressionWithMemory`."""
        return _TopKBucket(name, parameters, reduction, memory, self.ratio)


def take_largest(tensor: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    """Moves the largest values out of a contiguous tensor, which keeps the rest and has zeros in their places.

    Returns:
        Values, and their indices into the flattened tensor: int64[max(1, ceil(ratio * numel))]; none if it is empty.
    """
    flat = tensor.view(-1)
    count = min(flat.numel(), max(1, math.ceil(ratio * flat.numel())))
    indices = torch.topk(flat.abs(), count, sorted=False).indices
    values = flat[indices]
    flat[indices] = 0
    return values, indices


class _TopKBucket(Bucket):
    def __init__(
        self, name: str, parameters: Mapping[int, Tensor], reduction: GradientReduction, memory: Memory, ratio: float
    ) -> None:
        super().__init__(name, parameters, reduction)
        self._memory = memory
        self._ratio = ratio
        self._taken: dict[int, tuple[Tensor, Tensor]] = {}

    def collect(self) -> None:
        values, indices = self._wait()
        assert self._handle is not None
        rows = list(self._handle.gathered_rows[0])
        parameters = self.parameters.values()
        sample = next(iter(parameters))
        flat = torch.zeros(sum(p.numel() for p in parameters), dtype=sample.dtype, device=sample.device)
        # Rank by rank: inside a rank no index comes twice, so the order of additions, and the bits, are everywhere
        # the same.
        for some, where in zip(torch.split(values, rows), torch.split(indices, rows), strict=True):
            flat.index_add_(0, where, some)
        if self.reduction.op is ReduceOp.AVERAGE:
            flat /= len(members_of(self.reduction.process_set))
        parts = torch.split(flat, [parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            if parameter.requires_grad:
                parameter.grad = part.view(parameter.shape)

    def drop(self) -> None:
        super().drop()
        self._taken.clear()

    def _take(self, position: int) -> None:
        memory = self._memory.setdefault(position, {})
        left = with_residual(self.parameters[position], memory).contiguous()
        self._taken[position] = take_largest(left, self._ratio)
        memory[RESIDUAL] = left

    def _send(self) -> Handle:
        values, indices, offset = [], [], 0
        for position, parameter in self.parameters.items():
            values.append(self._taken[position][0])
            indices.append(self._taken[position][1] + offset)
            offset += parameter.numel()
        # Four bytes are enough for any bucket that fits into memory but the largest.
        dtype = torch.int32 if offset < 2**31 else torch.int64
        return submit_allgather(
            [torch.cat(values), torch.cat(indices).to(dtype)],
            name=self.name,
            is_grouped=True,
            process_set=self.reduction.process_set,
        )
