"""DistributedOptimizer: any torch optimizer, stepping with gradients combined over the ranks."""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer import runtime
from trainer.engine.requests import ReduceOp
from trainer.gradients import GradientReducer, Reduction

_counter = itertools.count()


def DistributedOptimizer(  # noqa: N802 - Horovod's name, which users call like a class
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    *,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
) -> Any:
    """Wraps an optimizer so that ``step`` uses the gradients of all ranks.

    The result is an instance of a subclass of the optimizer's class and shares its parameter groups and
    state; ``state_dict`` is that of the plain optimizer. Every rank wraps its optimizers in the same order.
    Gradients are reduced while the backward pass runs and live in reused buffers from then on: clone one to
    keep it over the next backward pass.

    Args:
        optimizer: over the same parameters in the same order on every rank.
        named_parameters: usually ``model.named_parameters()``, for messages.
        backward_passes_per_step: how many backward passes accumulate before the ranks communicate. The
            gradients are summed over the passes, not averaged.
        op: Average or Sum over the ranks.
        gradient_predivide_factor: splits the averaging: gradients are divided by this before they are summed,
            and by ``size() / gradient_predivide_factor`` afterwards. Only with Average.

    Raises:
        ValueError: not initialized; names not unique or not complete; factors or passes out of range.
    """
    if gradient_predivide_factor != 1.0 and op is not ReduceOp.AVERAGE:
        raise ValueError("gradient_predivide_factor is only supported with op=Average")
    reduction = Reduction(op, 1.0 / gradient_predivide_factor, gradient_predivide_factor)
    names = _name_parameters(optimizer, named_parameters)
    base = type(optimizer)
    subclass: Any = type(base.__name__, (_Distributed, base), {})
    wrapped: _Distributed = subclass.__new__(subclass)
    # A learning-rate scheduler leaves a bound step() of the plain optimizer behind.
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    wrapped.set_up(names, reduction, backward_passes_per_step)
    return wrapped


class _Distributed(torch.optim.Optimizer):
    """What the subclass adds: nothing in a world of one, where there is nobody to wait for."""

    def set_up(self, names: dict[Tensor, str], reduction: Reduction, passes_per_step: int) -> None:
        """Takes the place of a constructor, which would make a new state and new parameter groups."""
        self._names = names
        self._reduction = reduction
        self._reducer_name = f"gradients.{next(_counter)}"
        self._should_synchronize = True
        self._is_synchronized = False
        self._reducer: GradientReducer | None = None
        self._passes_per_step = _checked_passes(passes_per_step)
        if runtime.size() > 1:
            self._reducer = self._hook_parameters()

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

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Like the base class's; gradients seen so far are forgotten."""
        if self._reducer is not None:
            self._reducer.reset()
        self._is_synchronized = False
        super().load_state_dict(*args, **kwargs)

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def synchronized() -> Any:
            loss = closure()
            self.synchronize()
            self._is_synchronized = False
            return loss

        return synchronized

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _hook_parameters(self) -> GradientReducer:
        parameters = self._parameters()
        return GradientReducer(
            parameters,
            [self._names.get(parameter, f"parameter {i}") for i, parameter in enumerate(parameters)],
            reduction=self._reduction,
            passes_per_step=self._passes_per_step,
            name=self._reducer_name,
        )

    def _catch_up_unfrozen(self) -> None:
        """Reduces parameters that have become trainable, or were added, since the buckets were planned.

        All ranks must have changed the same ones.
        """
        assert self._reducer is not None
        parameters = self._parameters()
        covers = self._reducer.covers + (False,) * (len(parameters) - len(self._reducer.covers))
        if covers == tuple(parameter.requires_grad for parameter in parameters):
            return
        self._reducer.close()
        self._reducer = self._hook_parameters()
        late = [p for p, was_covered in zip(parameters, covers, strict=True) if p.requires_grad and not was_covered]
        if late:
            self._reduce_late(late)

    def _reduce_late(self, parameters: Sequence[Tensor]) -> None:
        late = GradientReducer(
            parameters,
            [""] * len(parameters),
            reduction=self._reduction,
            passes_per_step=self._passes_per_step,
            name=f"{self._reducer_name}.late",
        )
        late.finish()
        late.close()


def _checked_passes(passes: int) -> int:
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, not {passes}")
    return passes


def _name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        return {parameter: f"parameter {i}" for i, parameter in enumerate(parameters)}
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), "
            "usually produced by model.named_parameters()"
        )
    names = [name for name, _ in pairs]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(f"parameter names in named_parameters must be unique; found twice: {', '.join(duplicates)}")
    named = {parameter: name for name, parameter in pairs}
    num_unnamed = sum(parameter not in named for parameter in parameters)
    if num_unnamed:
        raise ValueError(f"named_parameters was given, but {num_unnamed} parameters of the optimizer are not named")
    return named
