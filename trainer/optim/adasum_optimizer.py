"""The optimizer of Adasum: each rank makes a step of its own, and the ranks combine what the steps changed.

Combining gradients would be no use to optimizers that normalise them, such as Adam (Maleki et al. 2020).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from datasvc.trainer.engine.negotiation.requests import ReduceOp
from datasvc.trainer.gradients.compression import Compressor
from datasvc.trainer.gradients.compression_with_memory import CompressionWithMemory
from datasvc.trainer.job import runtime
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set
from datasvc.trainer.job.submit import submit_allreduce
from datasvc.trainer.optim.parameter_names import parameters_of
from datasvc.trainer.optim.wrapper_numbers import take_number


def make_adasum_optimizer(
    optimizer: torch.optim.Optimizer,
    compression: type[Compressor] | CompressionWithMemory,
    process_set: ProcessSet,
    *,
    names: Mapping[Tensor, str],
    passes_per_step: int,
) -> Any:
    """Wraps an optimizer; see `DistributedOptimizer`.

    Raises:
        ValueError: a process set, a number of ranks that is no power of two, or a compression with a memory.
    """
    if process_set is not global_process_set:
        raise ValueError(f"Adasum is for all ranks, not for {process_set}")
    if runtime.size() & (runtime.size() - 1):
        raise ValueError(f"Adasum needs a power of two of ranks, not {runtime.size()}")
    base = type(optimizer)
    subclass: Any = type(base.__name__, (_DistributedAdasumOptimizer, base), {})
    wrapped: _DistributedAdasumOptimizer = subclass.__new__(subclass)
    # A learning-rate scheduler leaves a bound step() of the plain optimizer behind.
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    assert not isinstance(compression, CompressionWithMemory)
    wrapped.set_up(compression, names, passes_per_step)
    return wrapped


class _DistributedAdasumOptimizer(torch.optim.Optimizer):
    # What `DistributedOptimizer` was given, for programs that look.
    op = ReduceOp.ADASUM
    gradient_predivide_factor = 1.0
    process_set = global_process_set
    sparse_as_dense = False

    def set_up(self, compression: type[Compressor], names: Mapping[Tensor, str], passes_per_step: int) -> None:
        self._compression = compression
        self._parameter_names = names
        self.backward_passes_per_step = passes_per_step
        self._name = f"adasum.{take_number('adasum')}"

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes the attribute and no more: ranks communicate in ``step``, however many passes came before."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Does nothing: there is nothing to combine before the step."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises AssertionError: a step is not complete without the other ranks."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps, and adds to where the parameters were before what the changes of all ranks combine to."""
        parameters = [parameter for parameter in parameters_of(self) if parameter.requires_grad]
        before = [parameter.detach().clone() for parameter in parameters]
        loss = super().step(closure) if closure is not None else super().step()
        with torch.no_grad():
            self._combine(parameters, before)
        return loss

    # See the optimizer of averages.
    step.hooked = True  # type: ignore[attr-defined]

    def _combine(self, parameters: list[Tensor], before: list[Tensor]) -> None:
        changes = [parameter.detach() - old for parameter, old in zip(parameters, before, strict=True)]
        compressed = [self._compression.compress(change) for change in changes]
        # One operation, but a dot product for each parameter: that is what the method is about.
        wires = [wire for wire, _ in compressed]
        if wires:
            submit_allreduce(wires, wires, name=self._name, op=ReduceOp.ADASUM, is_grouped=True).wait()
        for parameter, old, (wire, context) in zip(parameters, before, compressed, strict=True):
            parameter.copy_(old + self._compression.decompress(wire, context))
