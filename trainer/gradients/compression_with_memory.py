"""The protocol of compressors that remember, from step to step, what they have not sent yet (error feedback).

Law: what was applied so far, plus what the ranks remember, averaged, is the average of all gradients so far. Nothing
is lost, it only comes later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from datasvc.trainer.engine.negotiation.requests import ReduceOp
from datasvc.trainer.gradients.gradient_bucket import Bucket, GradientReduction

Memory = dict[int, dict[str, Any]]
"""By position of the parameter: tensors and numbers by name. Each rank's own."""

RESIDUAL = "residual"
"""In a memory: what of the gradients so far has not been sent, in the parameter's shape."""


@runtime_checkable
class HasMemory(Protocol):
    """An optimizer whose gradients may travel by a compression with memory."""

    def shared_memory(self) -> Memory:
        """What every rank shall remember alike: all but the residuals."""

    def adopt_shared_memory(self, memory: Memory) -> None:
        """Takes over another rank's; the residuals stay."""


class CompressionWithMemory(ABC):
    """For `DistributedOptimizer` only, with Average or Sum."""

    @abstractmethod
    def make_bucket(
        self, name: str, parameters: Mapping[int, Tensor], reduction: GradientReduction, memory: Memory
    ) -> Bucket:
        """A bucket that travels compressed, and keeps what it remembers in `memory`."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:  # noqa: ARG002 - as `Compressor`
        """Does not exist without a memory. Raises ValueError."""
        raise ValueError(f"{self} remembers what it has not sent, so only DistributedOptimizer can use it")

    def check(self, op: ReduceOp) -> None:
        """Raises ValueError: gradients combined like this cannot be sent bit by bit."""
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ValueError(f"{self} knows Average and Sum, not {op.value}")


def copied(memory: Memory, *, residuals: bool) -> Memory:
    """The memory, with or without what has not been sent."""
    return {
        position: {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in values.items()
            if residuals or key != RESIDUAL
        }
        for position, values in memory.items()
    }


def with_residual(parameter: Tensor, memory: dict[str, Any]) -> Tensor:
    """The parameter's gradient, zero if there is none, plus what was not sent of earlier ones: a new tensor."""
    residual = memory.get(RESIDUAL)
    if parameter.grad is None:
        return parameter.new_zeros(parameter.shape) if residual is None else residual.clone()
    gradient = parameter.grad.detach()
    return gradient.clone() if residual is None else gradient + residual
