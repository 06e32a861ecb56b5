"""DistributedOptimizer: any torch optimizer, stepping with gradients combined over the ranks."""

import contextlib
import os
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from datasvc.trainer.engine.negotiation.requests import ReduceOp
from datasvc.trainer.gradients.compression import Compression, Compressor
from datasvc.trainer.gradients.compression_with_memory import RESIDUAL, CompressionWithMemory, Memory, copied
from datasvc.trainer.gradients.gradient_bucket import GradientReduction
from datasvc.trainer.gradients.gradient_reducer import Exchange, GradientReducer
from datasvc.trainer.job import runtime
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set
from datasvc.trainer.optim.adasum_optimizer import _DistributedAdasumOptimizer, make_adasum_optimizer  # noqa: F401 - programs look for it here
from datasvc.trainer.optim.parameter_names import Groups, check_groups, name_parameters, parameters_of, place_groups
from datasvc.trainer.optim.wrapper_numbers import take_number

_process_token = uuid.uuid4().hex


def DistributedOptimizer(  # noqa: N802 - Horovod's name, which users call like a class
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] | CompressionWithMemory = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wraps an optimizer so that ``step`` uses the gradients of all ranks.

    The result is an instance of a subclass of the optimizer's class and shares its parameter groups and
    state; ``state_dict`` fits the plain optimizer. Every rank wraps its optimizers in the same order.
    Gradients are combined while the backward pass runs and live in reused buffers from then on: clone one to
    keep it over the next backward pass.

    Args:
        optimizer: over the same parameters in the same order, and memory format, on every rank.
        named_parameters: usually ``model.named_parameters()``, for messages.
        compression: what travels: ``Compression.none``, ``.fp16``, ``.bf16``, ``.topk(...)``, ``.powersgd(...)``, or
            a subclass of `Compressor`.
        backward_passes_per_step: how many backward passes accumulate before the ranks communicate. The
            gradients are summed over the passes, not averaged.
        op: Average or Sum over the ranks; or Adasum, by which the ranks combine what their own steps changed.
        gradient_predivide_factor: splits the averaging: gradients are divided by this before they are summed,
            and by ``size() / gradient_predivide_factor`` afterwards. Only with Average.
        num_groups: deprecated: ``groups``.
        groups: parameters whose gradients travel as one operation: lists of them, or a number of even runs of
            parameters, with which every rank's call waits for the others. Without, groups are made by size.
        sparse_as_dense: whether sparse gradients travel as dense ones; afterwards they are sparse again. Otherwise
            indices and values are gathered; then a parameter with sparse gradients must have one on every rank in its
            first step, unless the optimizer is SparseAdam.
        process_set: whose gradients are combined. On other ranks the optimizer is as it was.

    Raises:
        ValueError: not initialized; names not unique or not complete; arguments out of range, or not possible
            together.
    """
    if gradient_predivide_factor != 1.0 and op is not ReduceOp.AVERAGE:
        raise ValueError("gradient_predivide_factor is only supported with op=Average")
    groups = _choose_groups(num_groups, groups)
    if isinstance(compression, CompressionWithMemory):
        compression.check(op)
    names = name_parameters(optimizer, named_parameters)
    passes = _checked_passes(backward_passes_per_step)
    if op is ReduceOp.ADASUM and (runtime.size() > 1 or runtime.is_elastic()):
        return make_adasum_optimizer(optimizer, compression, process_set, names=names, passes_per_step=passes)
    reduction = GradientReduction(op=op, predivide_factor=gradient_predivide_factor, process_set=process_set)
    base = type(optimizer)
    subclass: Any = type(base.__name__, (_DistributedOptimizer, base), {})
    wrapped: _DistributedOptimizer = subclass.__new__(subclass)
    # A learning-rate scheduler leaves a bound step() of the plain optimizer behind.
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    placed = place_groups(groups, parameters_of(optimizer), names, process_set) if _takes_part(process_set) else []
    # SparseAdam takes no dense gradient, not even on a rank that has none in its first step.
    sparse = set(range(len(names))) if isinstance(optimizer, torch.optim.SparseAdam) else set()
    exchange = Exchange(
        reduction=reduction,
        compression=compression,
        groups=placed,
        sparse_as_dense=sparse_as_dense,
        sparse=sparse,
    )
    wrapped.set_up(names, exchange, passes)
    return wrapped


class _DistributedOptimizer(torch.optim.Optimizer):
    """What the subclass adds: nothing in a world of one, nor out of the process set: there is nobody to wait for."""

    def set_up(self, names: dict[Tensor, str], exchange: Exchange, passes_per_step: int) -> None:
        """Takes the place of a constructor, which would make a new state and new parameter groups."""
        self._parameter_names = names
        self._exchange = exchange
        self._reducer_name = f"gradients.{take_number('gradients')}"
        self._should_synchronize = True
        self._is_synchronized = False
        self._reducer: GradientReducer | None = None
        self._passes_per_step = passes_per_step
        if _takes_part(exchange.reduction.process_set):
            self._reducer = self._hook_parameters(parameters_of(self), self._reducer_name)

    @property
    def op(self) -> ReduceOp:
        """As given, as the four below."""
        return self._exchange.reduction.op

    @property
    def gradient_predivide_factor(self) -> float:
        """See `DistributedOptimizer`."""
        return self._exchange.reduction.predivide_factor

    @property
    def process_set(self) -> ProcessSet:
        """See `DistributedOptimizer`."""
        return self._exchange.reduction.process_set

    @property
    def sparse_as_dense(self) -> bool:
        """See `DistributedOptimizer`."""
        return self._exchange.sparse_as_dense

    @property
    def backward_passes_per_step(self) -> int:
        """Can be set: see `set_backward_passes_per_step`."""
        return self._passes_per_step

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes accumulate; only between ``step`` and ``backward``, on all ranks.

        Raises:
            ValueError: less than one.
        """
        self._passes_per_step = _checked_passes(passes)
        if self._reducer is not None:
            self._reducer.reset()
            self._reducer.passes_per_step = passes

    def synchronize(self) -> None:
        """Completes the reduction: afterwards every ``grad`` is the combined one, e.g. to clip it.

        Every rank calls this. ``step`` then belongs into ``skip_synchronize``.

        Raises:
            HorovodInternalError: ranks disagree on the parameters, or a rank is lost.
        """
        if self._reducer is not None:
            try:
                self._reducer.finish()
                self._catch_up_unfrozen()
            finally:
                self._is_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, ``step`` takes the gradients as they are."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the combined gradients and steps; a closure's are combined after each call of it."""
        if closure is not None and self._reducer is not None and self._should_synchronize:
            return super().step(self._synchronizing(closure))
        if self._should_synchronize:
            if self._is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider "
                    "using optimizer.skip_synchronize() context if you use optimizer.synchronize() in "
                    "your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._is_synchronized = False
        return super().step(closure) if closure is not None else super().step()

    # torch wraps a step() without this mark in profiling and user hooks; the base class's own is wrapped
    # already.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Like the base class's.

        Raises:
            AssertionError: gradients are being reduced, that is, between ``backward`` and ``step``.
        """
        if self._reducer is not None and self._reducer.is_reducing():
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The base class's; under "compression" what a compression remembers, which is this rank's own."""
        state: dict[str, Any] = super().state_dict()
        if isinstance(self._exchange.compression, CompressionWithMemory):
            memory = copied(self._exchange.memory, residuals=True)
            state["compression"] = {"rank": runtime.rank(), "process": _name_process(), "memory": memory}
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Like the base class's; gradients seen so far are forgotten.

        What a rank had not sent yet comes back only to that rank, or to the process that saved it if that has another
        number now; in another rank's state it is left out.
        """
        if self._reducer is not None:
            self._reducer.reset()
        self._is_synchronized = False
        super().load_state_dict(*args, **kwargs)
        state: Mapping[str, Any] = args[0] if args else kwargs["state_dict"]
        if isinstance(self._exchange.compression, CompressionWithMemory):
            saved = state.get("compression", {"rank": None, "memory": {}})
            self._exchange.memory.clear()
            is_mine = saved["rank"] == runtime.rank() or saved.get("process") == _name_process()
            self._remember(copied(saved["memory"], residuals=is_mine))

    def shared_memory(self) -> Memory:
        """What a compression remembers and every rank shall know alike."""
        return copied(self._exchange.memory, residuals=False)

    def adopt_shared_memory(self, memory: Memory) -> None:
        """Takes over another rank's; what this rank has not sent yet it still has to send."""
        mine = self._exchange.memory
        residuals = {
            position: {RESIDUAL: values[RESIDUAL]} for position, values in mine.items() if RESIDUAL in values
        }
        mine.clear()
        self._remember(memory)
        self._remember(residuals)

    def _remember(self, memory: Memory) -> None:
        for position, parameter in enumerate(parameters_of(self)):
            for key, value in memory.get(position, {}).items():
                mine = self._exchange.memory.setdefault(position, {})
                mine[key] = value.to(parameter.device) if isinstance(value, Tensor) else value

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def synchronized() -> Any:
            loss = closure()
            self.synchronize()
            self._is_synchronized = False
            return loss

        return synchronized

    def _hook_parameters(self, parameters: Sequence[Tensor], name: str) -> GradientReducer:
        positions = {parameter: i for i, parameter in enumerate(parameters_of(self))}
        return GradientReducer(
            {positions[parameter]: parameter for parameter in parameters},
            {
                positions[parameter]: self._parameter_names.get(parameter, f"parameter {positions[parameter]}")
                for parameter in parameters
            },
            exchange=self._exchange,
            passes_per_step=self._passes_per_step,
            name=name,
        )

    def _catch_up_unfrozen(self) -> None:
        """Reduces parameters that have become trainable, or were added, since the buckets were planned.

        All ranks must have changed the same ones.
        """
        assert self._reducer is not None
        parameters = parameters_of(self)
        covers = self._reducer.covers
        trainable = {i for i, parameter in enumerate(parameters) if parameter.requires_grad}
        if covers == trainable:
            return
        self._reducer.close()
        self._reducer = self._hook_parameters(parameters, self._reducer_name)
        late = sorted(trainable - covers)
        if late:
            reducer = self._hook_parameters([parameters[i] for i in late], f"{self._reducer_name}.late")
            reducer.finish()
            reducer.close()


def _name_process() -> str:
    """Unlike any other's, of this job or another: a fork has the same first half."""
    return f"{_process_token}.{os.getpid()}"


def _takes_part(process_set: ProcessSet) -> bool:
    if not process_set.included():
        return False
    return process_set.size() > 1 or runtime.is_elastic()


def _choose_groups(num_groups: int, groups: Groups) -> Groups:
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
        if groups is None:
            groups = num_groups
    check_groups(groups)
    return groups


def _checked_passes(passes: int) -> int:
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, not {passes}")
    return passes
