"""`DistributedOptimizer`: a wrapper of any torch optimizer that combines the gradients of all ranks."""

from __future__ import annotations

import contextlib
import os
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from datasvc.trainer.engine.negotiation.requests import ReduceOp
from datasvc.trainer.gradients.bucket_choice import BUCKET_BYTES, AllReduceCost
from datasvc.trainer.gradients.bucket_tuner import BucketTuner
from datasvc.trainer.gradients.compression import Compression, Compressor
from datasvc.trainer.gradients.compression_with_memory import OF_ONE_RANK, CompressionWithMemory, Memory, copy_memory
from datasvc.trainer.gradients.gradient_bucket import GradientReduction
from datasvc.trainer.gradients.gradient_reducer import FLAT_DTYPES, Exchange, GradientReducer
from datasvc.trainer.job import runtime
from datasvc.trainer.job.process_sets import ProcessSet, global_process_set
from datasvc.trainer.optim.adasum_optimizer import (
    _DistributedAdasumOptimizer,  # noqa: F401 - programs import it from here
    check_passes,
    make_adasum_optimizer,
    wrap_optimizer,
)
from datasvc.trainer.optim.parameter_names import (
    Groups,
    check_groups,
    name_parameters,
    next_number,
    parameters_of,
    place_groups,
)

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)

# Part of the name by which a saved state identifies the process that saved it; see `_name_process`.
_process_token = uuid.uuid4().hex


def DistributedOptimizer(  # noqa: N802 - Horovod's name, which users call like a class
    optimizer: Opt,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] | Compressor | CompressionWithMemory = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    bucket_bytes: int | Literal["auto"] | None = None,
) -> Opt:
    """Wrap an optimizer so that `step` uses the gradients of all ranks.

    The result is an instance of a subclass of the optimizer's class. It shares the parameter groups and the state,
    and the plain optimizer can load its `state_dict`. Every rank wraps its optimizers in the same order. Gradients
    are combined during the backward pass and are stored in reused buffers: clone a gradient to keep it past the next
    backward pass.

    Args:
        optimizer: over the same parameters, in the same order and memory format, on every rank.
        named_parameters: names for error messages, usually `model.named_parameters()`.
        compression: a member of `Compression`, such as `.fp16` or `.topk(...)`, or another compressor.
        backward_passes_per_step: passes to sum, not to average, before the ranks communicate.
        op: Average or Sum of the gradients; or Adasum, which combines the changes that the local steps make.
        gradient_predivide_factor: divides before the sum, `size() / gradient_predivide_factor` after; for Average.
        num_groups: deprecated; use `groups`.
        groups: parameters whose gradients are sent as one operation: lists, or the number of groups of consecutive
            parameters. With a number, the call is a collective. None groups them by size.
        sparse_as_dense: whether sparse gradients are sent as dense tensors, instead of gathering indices and values,
            which needs a gradient of every rank in the first step of a parameter, unless SparseAdam updates it.
        process_set: ranks whose gradients are combined. On other ranks the result behaves like the plain optimizer.
        bucket_bytes: maximum size of what is sent together, at first at most 1 MiB; 0 sends each gradient alone.
            "auto" chooses it by measuring the first steps. None: 25 MiB. The engine's `fusion_bytes` limits it too.

    Raises:
        ValueError: the trainer is not initialized; names are given twice or are missing; or an argument is invalid.
    """
    groups = _choose_groups(num_groups, groups)
    if gradient_predivide_factor != 1.0 and op is not ReduceOp.AVERAGE:
        raise ValueError("gradient_predivide_factor is only supported with op=Average")
    if isinstance(compression, CompressionWithMemory):
        compression.check(op, optimizer)
    max_bytes, tuner = _choose_buckets(bucket_bytes, op, compression, groups, process_set)
    names, passes = name_parameters(optimizer, named_parameters), check_passes(backward_passes_per_step)
    # A single rank has nothing to combine, so `_DistributedOptimizer` is enough for Adasum too.
    if op is ReduceOp.ADASUM and (runtime.size() > 1 or runtime.is_elastic()):
        adasum = make_adasum_optimizer(optimizer, compression, process_set, names=names, passes_per_step=passes)
        return cast("Opt", adasum)
    wrapped: _DistributedOptimizer = wrap_optimizer(optimizer, _DistributedOptimizer)
    takes_part = _takes_part(process_set, compression)
    exchange = Exchange(
        reduction=GradientReduction(op=op, predivide_factor=gradient_predivide_factor, process_set=process_set),
        compression=compression,
        groups=place_groups(groups, parameters_of(optimizer), names, process_set) if takes_part else [],
        sparse_as_dense=sparse_as_dense,
        # SparseAdam rejects dense gradients, so even a rank without a gradient in the first step sends a sparse one.
        sparse=set(range(len(names))) if isinstance(optimizer, torch.optim.SparseAdam) else set(),
        bucket_bytes=max_bytes,
        tuner=tuner,
    )
    wrapped.set_up(names, exchange, passes)
    return cast("Opt", wrapped)  # an instance of a subclass of its class


class _DistributedOptimizer(torch.optim.Optimizer):
    """The methods that `wrap_optimizer` adds. With one rank, or outside the process set, they do not communicate."""

    def set_up(self, names: dict[Tensor, str], exchange: Exchange, passes_per_step: int) -> None:
        """Initialize the added attributes."""
        self._parameter_names = names
        self._exchange = exchange
        self._reducer_name = f"gradients.{next_number('gradients')}"
        self._should_synchronize = True  # False inside `skip_synchronize`
        self._is_synchronized = False  # whether `synchronize` was called since the last step
        self._reducer: GradientReducer | None = None
        self._passes_per_step = passes_per_step
        if _takes_part(exchange.reduction.process_set, exchange.compression):
            self._reducer = self._make_reducer(parameters_of(self), self._reducer_name)

    # Arguments of `DistributedOptimizer`, for programs that read them from the optimizer; they cannot be set.
    op = property(attrgetter("_exchange.reduction.op"))
    gradient_predivide_factor = property(attrgetter("_exchange.reduction.predivide_factor"))
    process_set = property(attrgetter("_exchange.reduction.process_set"))
    sparse_as_dense = property(attrgetter("_exchange.sparse_as_dense"))

    @property
    def bucket_bytes(self) -> int | None:
        """Maximum size of the buckets in use; None if this rank sends nothing."""
        return None if self._reducer is None else self._reducer.bucket_bytes

    @property
    def all_reduce_cost(self) -> AllReduceCost | None:
        """The cost of an all-reduce that `bucket_bytes="auto"` has measured; None before its choice."""
        tuner = self._exchange.tuner
        return None if tuner is None else tuner.cost

    @property
    def is_choosing_buckets(self) -> bool:
        """Whether this rank still measures steps to choose the size of buckets."""
        tuner = self._exchange.tuner
        return self._reducer is not None and tuner is not None and tuner.bucket_bytes is None

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes per step. Setting it calls `set_backward_passes_per_step`."""
        return self._passes_per_step

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes per step; call it between `step` and `backward`, on all ranks.

        Raises:
            ValueError: `passes` is less than 1.
        """
        self._passes_per_step = check_passes(passes)
        if self._reducer is not None:
            # Passes that were counted toward the previous number do not count toward the new one.
            self._reducer.reset()
            self._reducer.passes_per_step = passes

    def synchronize(self) -> None:
        """Wait until every `grad` holds the combined gradient, for example to clip it.

        Every rank calls this. Then call `step` inside `skip_synchronize`, so that `step` does not combine again.

        Raises:
            HorovodInternalError: ranks disagree on the parameters, or a rank is lost.
        """
        if self._reducer is not None:
            try:
                self._reducer.finish()
                self._reduce_new_parameters()
                self._reducer.tune()
            finally:
                self._is_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step` use the gradients as they are inside the block, without combining them."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Combine the gradients, then make a step. If there is a closure, combine them after each of its calls."""
        # A closure computes the gradients inside of `step`, possibly several times, as for LBFGS.
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
        # Do not call step(None), because the step of some optimizers takes no argument.
        return super().step(closure) if closure is not None else super().step()

    # This attribute prevents profiling and user hooks by torch: the step() of the base class has them already.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients, as the base class does.

        Raises:
            AssertionError: gradients are being reduced, that is, the call is between `backward` and `step`.
        """
        if self._reducer is not None and self._reducer.is_reducing():
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the base class. "compression" has what this rank's compression keeps between steps.

        Between `backward` and `step` it warns: a state has no gradients.
        """
        if self._reducer is not None and self._reducer.has_open_passes:
            warnings.warn(
                "optimizer.state_dict() was called between loss.backward() and optimizer.step(): the state does not "
                f"have the gradients of the open step ({self._passes_per_step} backward passes), so a run that "
                "continues from it loses them; save after optimizer.step()",
                stacklevel=2,
            )
        state: dict[str, Any] = super().state_dict()
        if isinstance(self._exchange.compression, CompressionWithMemory):
            memory = copy_memory(self._exchange.memory, residuals=True)
            state["compression"] = {"rank": runtime.rank(), "process": _name_process(), "memory": memory}
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state, as the base class does, and discard accumulated gradients.

        Residuals of a compression (what it has not sent yet) belong to one rank. They are restored on the rank that
        saved them, and in the process that saved them even if its rank has changed. Other ranks ignore them.
        """
        if self._reducer is not None:
            self._reducer.reset()  # gradients from before the load must not enter the next step
        self._is_synchronized = False
        super().load_state_dict(*args, **kwargs)
        state: Mapping[str, Any] = args[0] if args else kwargs["state_dict"]
        if isinstance(self._exchange.compression, CompressionWithMemory):
            # The state of a plain optimizer has no memory.
            saved = state.get("compression", {"rank": None, "memory": {}})
            self._exchange.memory.clear()
            is_own_state = saved["rank"] == runtime.rank() or saved.get("process") == _name_process()
            self._remember(copy_memory(saved["memory"], residuals=is_own_state))

    def shared_memory(self) -> Memory:
        """Return the part of the compression's memory that must be equal on all ranks."""
        return copy_memory(self._exchange.memory, residuals=False)

    def adopt_shared_memory(self, memory: Memory) -> None:
        """Replace the shared part of the compression's memory by that of another rank; keep the local residuals."""
        local_memory = self._exchange.memory
        residuals = {
            position: {name: value for name, value in values.items() if name in OF_ONE_RANK}
            for position, values in local_memory.items()
        }
        local_memory.clear()
        self._remember(memory)
        self._remember(residuals)

    def _remember(self, memory: Memory) -> None:
        """Add `memory` to the compression's memory, with tensors on the devices of their parameters."""
        for position, parameter in enumerate(parameters_of(self)):
            for key, value in memory.get(position, {}).items():
                entry = self._exchange.memory.setdefault(position, {})
                entry[key] = value.to(parameter.device) if isinstance(value, Tensor) else value

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that combines the gradients of all ranks after each call of `closure`."""

        def synchronized() -> Any:
            loss = closure()
            self.synchronize()
            self._is_synchronized = False
            return loss

        return synchronized

    def _make_reducer(self, parameters: Sequence[Tensor], name: str) -> GradientReducer:
        """Return a new reducer for some of the optimizer's parameters; it sets hooks on them."""
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

    def _reduce_new_parameters(self) -> None:
        """Combine the gradients of parameters that became trainable, or were added, after the buckets were planned.

        Plan new buckets for them, and also after parameters were frozen. All ranks must change the same parameters.
        """
        assert self._reducer is not None
        parameters = parameters_of(self)
        covered = self._reducer.covers  # positions of parameters
        trainable = {i for i, parameter in enumerate(parameters) if parameter.requires_grad}
        if covered == trainable:
            return
        self._reducer.close()
        self._reducer = self._make_reducer(parameters, self._reducer_name)
        new_positions = sorted(trainable - covered)
        if new_positions:
            # The new reducer has missed this backward pass, so a temporary reducer sends the new gradients.
            new_parameters = [parameters[position] for position in new_positions]
            temporary_reducer = self._make_reducer(new_parameters, f"{self._reducer_name}.late")
            temporary_reducer.finish()
            temporary_reducer.close()


def _name_process() -> str:
    """Return a name that no other process has, on any host."""
    # A forked child inherits the token, so the name also contains the process id.
    return f"{_process_token}.{os.getpid()}"


def _takes_part(process_set: ProcessSet, compression: type[Compressor] | Compressor | CompressionWithMemory) -> bool:
    """Return whether this rank combines gradients. In an elastic job a single rank does, because others may join."""
    if not process_set.included():
        return False
    has_momentum = isinstance(compression, CompressionWithMemory) and compression.has_momentum
    return process_set.size() > 1 or runtime.is_elastic() or has_momentum


def _choose_buckets(
    bucket_bytes: int | Literal["auto"] | None,
    op: ReduceOp,
    compression: type[Compressor] | Compressor | CompressionWithMemory,
    groups: Groups,
    process_set: ProcessSet,
) -> tuple[int, BucketTuner | None]:
    """Return the maximum size of a bucket in bytes, and the tuner for "auto". Raise ValueError: invalid with `op`."""
    if bucket_bytes is None:
        return BUCKET_BYTES, None
    if op is ReduceOp.ADASUM:
        raise ValueError("bucket_bytes has no effect with op=Adasum, which sends no buckets; leave it out")
    if bucket_bytes == "auto":
        return BUCKET_BYTES, _make_tuner(compression, groups, process_set)
    if bucket_bytes < 0:
        raise ValueError(f'bucket_bytes must be "auto" or a number of bytes, at least 0, not {bucket_bytes}')
    return bucket_bytes, None


def _make_tuner(
    compression: type[Compressor] | Compressor | CompressionWithMemory, groups: Groups, process_set: ProcessSet
) -> BucketTuner:
    """Return the tuner for `bucket_bytes="auto"`.

    Raises:
        ValueError: the gradients are not sent in buckets whose size can be chosen.
    """
    if groups is not None:
        raise ValueError('bucket_bytes="auto" chooses what is sent together, and so do groups; leave one of them out')
    if not isinstance(compression, type) or compression not in FLAT_DTYPES:
        raise ValueError(
            'bucket_bytes="auto" is supported with the compressions none, fp16 and bf16; with another one give a '
            "number of bytes, or leave it out"
        )
    return BucketTuner(process_set, FLAT_DTYPES[compression])


def _choose_groups(num_groups: int, groups: Groups) -> Groups:
    """Return `groups`, checked; if it is None, the deprecated argument `num_groups` instead."""
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
        if groups is None:
            groups = num_groups
    check_groups(groups)
    return groups
