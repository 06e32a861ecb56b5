"""Optimizer for Adasum: each rank makes a local step, then the ranks combine the changes of the parameters.

`DistributedOptimizer` returns it for `op=Adasum`. The changes are combined, not the gradients, because optimizers
such as Adam normalize the gradients (Maleki et al. 2020).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from datasvc.trainer.engine.negotiation.requests import ReduceOp
from datasvc.trainer.gradients.compression import Compressor
from datasvc.trainer.gradients.compression_with_memory import CompressionWithMemory
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set
from datasvc.trainer.job.submit import check_adasum_ranks, submit_allreduce
from datasvc.trainer.optim.parameter_names import next_number, parameters_of


def wrap_optimizer(optimizer: torch.optim.Optimizer, methods: type) -> Any:
    """Return an instance of a new subclass of the optimizer's class; it shares the parameter groups and the state.

    The methods of the class `methods` override those of the optimizer's class.
    """
    base = type(optimizer)
    subclass: Any = type(base.__name__, (methods, base), {})
    # Do not call the constructor, because it would create new state and parameter groups.
    wrapped = subclass.__new__(subclass)
    # Leave out "step": a learning-rate scheduler stores a step() of the instance, which would hide that of `methods`.
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    if "step" in optimizer.__dict__:
        # That scheduler would warn that the given optimizer makes no steps: `wrapped` makes them.
        optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - the scheduler's own mark
    return wrapped


def check_passes(passes: int) -> int:
    """Return the number of backward passes per step. Raises ValueError: it is less than 1."""
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, not {passes}")
    return passes


def make_adasum_optimizer(
    optimizer: torch.optim.Optimizer,
    compression: type[Compressor] | Compressor | CompressionWithMemory,
    process_set: ProcessSet,
    *,
    names: Mapping[Tensor, str],
    passes_per_step: int,
) -> Any:
    """Wrap an optimizer for Adasum. The arguments are those of `DistributedOptimizer`, checked.

    Raises:
        ValueError: `process_set` is not the global one, or the number of ranks is not a power of two.
    """
    check_adasum_ranks(process_set)
    wrapped = wrap_optimizer(optimizer, _DistributedAdasumOptimizer)
    # `DistributedOptimizer` has checked this: a compression with memory supports only Average and Sum.
    assert not isinstance(compression, CompressionWithMemory)
    wrapped.set_up(compression, names, passes_per_step)
    return wrapped


class _DistributedAdasumOptimizer(torch.optim.Optimizer):
    """The methods that `wrap_optimizer` adds to an optimizer for Adasum."""

    # Arguments of `DistributedOptimizer`, for programs that read them from the optimizer.
    op = ReduceOp.ADASUM
    gradient_predivide_factor = 1.0
    process_set = global_process_set
    sparse_as_dense = False

    def set_up(
        self, compression: type[Compressor] | Compressor, names: Mapping[Tensor, str], passes_per_step: int
    ) -> None:
        """Initialize the added attributes."""
        self._compression = compression
        self._parameter_names = names
        self._passes_per_step = passes_per_step
        self._name = f"adasum.{next_number('adasum')}"

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes per step. It has no effect: the ranks communicate in `step` only."""
        return self._passes_per_step

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self._passes_per_step = check_passes(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the attribute. Raises ValueError: `passes` is less than 1."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Do nothing: the ranks combine changes in `step`, not gradients before it."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise an error, because a step of Adasum always needs the other ranks.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield  # never reached; makes this function the generator that `contextmanager` needs

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a local step, then replace its change of the parameters by the combined change of all ranks."""
        # List the parameters in each step, because some may be frozen or added between steps.
        parameters = [parameter for parameter in parameters_of(self) if parameter.requires_grad]
        old_values = [parameter.detach().clone() for parameter in parameters]
        loss = super().step(closure) if closure is not None else super().step()
        with torch.no_grad():
            self._combine(parameters, old_values)
        return loss

    # This attribute prevents profiling and user hooks by torch: the step() of the base class has them already.
    step.hooked = True  # type: ignore[attr-defined]

    def _combine(self, parameters: list[Tensor], old_values: list[Tensor]) -> None:
        """Set the parameters to their values before the step plus the Adasum of the changes of all ranks."""
        changes = [parameter.detach() - old for parameter, old in zip(parameters, old_values, strict=True)]
        # Pairs of a compressed tensor and the context that `decompress` needs.
        compressed = [self._compression.compress(change) for change in changes]
        # Send all parameters as one operation; Adasum still computes a dot product for each parameter.
        tensors = [tensor for tensor, _ in compressed]
        if tensors:
            submit_allreduce(tensors, tensors, name=self._name, op=ReduceOp.ADASUM, is_grouped=True).wait()
        for parameter, old, (tensor, context) in zip(parameters, old_values, compressed, strict=True):
            parameter.copy_(old + self._compression.decompress(tensor, context))
