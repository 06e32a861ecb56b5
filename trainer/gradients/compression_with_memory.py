"""Interface of compressions with error feedback: a rank adds the unsent part of a gradient to the next gradient.

The unsent part is called the residual, and is stored in the memory of the compression. Invariant: the sum of all
applied gradients plus the average of the ranks' residuals equals the sum of the averaged gradients of all steps so
far. No part of a gradient is lost; it is only delayed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from datasvc.trainer.engine.negotiation.requests import ReduceOp
from datasvc.trainer.gradients.gradient_bucket import Bucket, GradientReduction

Memory = dict[int, dict[str, Any]]
"""The memory of a compression on one rank: for each position of a parameter in the optimizer, values by name."""

RESIDUAL = "residual"
"""Name of the unsent part of the gradients in a memory; it has the shape of the parameter."""

VELOCITY = "velocity"
"""Name of a rank's own momentum in a memory; it has the shape of the parameter."""

OF_ONE_RANK = frozenset({RESIDUAL, VELOCITY})
"""Names of the values that each rank has of its own; all others are equal on all ranks."""

NUM_STEPS = "num_steps"
"""Name of the number of steps so far in a memory."""


@runtime_checkable
class HasMemory(Protocol):
    """An optimizer that may use a compression with memory; `broadcast_optimizer_state` broadcasts the shared part."""

    def shared_memory(self) -> Memory:
        """Return the part of the memory that must be equal on all ranks: everything except `OF_ONE_RANK`."""

    def adopt_shared_memory(self, memory: Memory) -> None:
        """Replace the shared part of the memory by another rank's; keep `OF_ONE_RANK`."""


class CompressionWithMemory(ABC):
    """Base class of compressions with memory, for `DistributedOptimizer` with Average or Sum.

    Attributes:
        has_momentum: whether it applies the momentum of the optimizer, also for a single rank.
    """

    has_momentum: ClassVar[bool] = False

    @abstractmethod
    def make_bucket(
        self, name: str, parameters: Mapping[int, Tensor], reduction: GradientReduction, memory: Memory
    ) -> Bucket:
        """Return a bucket that sends compressed gradients and stores its state in `memory`."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:  # noqa: ARG002 - the signature of `Compressor`
        """Raise an error, because an operation that takes a plain `Compressor` has no memory.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{self} stores the unsent part of gradients, so only DistributedOptimizer can use it")

    def check(self, op: ReduceOp, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002 - subclasses use it
        """Check that the reduction is linear, because error feedback sends one gradient in parts, in several steps.

        Raises:
            ValueError: `op` is neither Average nor Sum.
        """
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ValueError(f"{self} supports Average and Sum, not {op.value}")


def copy_memory(memory: Memory, *, residuals: bool) -> Memory:
    """Return a copy of the memory, with or without the values of this rank alone, `OF_ONE_RANK`."""
    return {
        position: {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in values.items()
            if residuals or name not in OF_ONE_RANK
        }
        for position, values in memory.items()
    }


def count_step(memory: dict[str, Any]) -> None:
    """Count a step of a parameter in its memory."""
    memory[NUM_STEPS] = memory.get(NUM_STEPS, 0) + 1


def keep_residual(memory: dict[str, Any], residual: Tensor) -> None:
    """Store the unsent part of a gradient in the memory of its parameter. It may be changed: see `drop_infinite`."""
    memory[RESIDUAL] = drop_infinite(residual)


def drop_infinite(tensor: Tensor) -> Tensor:
    """Replace numbers that are not finite by 0, in place, and return the tensor.

    A gradient that is not finite is sent, so that all ranks see it, and then forgotten. Otherwise one overflow would
    make the gradients of all later steps not finite, also with a loss scale, which skips such steps.
    """
    return tensor.nan_to_num_(0.0, 0.0, 0.0)


def with_residual(parameter: Tensor, memory: dict[str, Any]) -> Tensor:
    """Return a new tensor: the gradient, or zeros without one, plus the residual of earlier gradients.

    The caller may change the tensor, so even a gradient without a residual is copied.
    """
    residual = memory.get(RESIDUAL)
    if parameter.grad is None:
        return parameter.new_zeros(parameter.shape) if residual is None else residual.clone()
    gradient = parameter.grad.detach()
    return gradient.clone() if residual is None else gradient + residual
