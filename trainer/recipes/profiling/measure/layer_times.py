"""How long each layer takes, forwards and backwards, and when each parameter's gradient is there.

Modules without children are stamped before and after their forward pass. In the backward pass a stamp is taken when
autograd reaches the node that made a module's output; the time until the next such stamp is the module's, with what
runs in between outside of any module (an addition, a reshape). What returns its input (an identity, a dropout of 0)
made no node, and has no backward pass. torch's own backward hooks of modules would not do: they forbid what changes
an activation in place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from datasvc.trainer.recipes.profiling.measure.clocks import Clock

BETWEEN: Final = "(between modules)"
LOSS: Final = "(loss)"


@dataclass(frozen=True)
class LayerSpan:
    """A stretch of time of one layer.

    Attributes:
        name: of the module, or `BETWEEN` or `LOSS`.
        is_backward: which pass it is of.
        start_s: since the forward pass began.
        duration_s: of it.
    """

    name: str
    is_backward: bool
    start_s: float
    duration_s: float


@dataclass
class LayerTimes:
    """One forward and one backward pass.

    Attributes:
        spans: in the order in which they ran.
        forward_s: of the whole pass.
        backward_s: likewise.
        ready_s: of each parameter that got a gradient: when, since the backward pass began.
    """

    spans: list[LayerSpan]
    forward_s: float
    backward_s: float
    ready_s: dict[Tensor, float]

    def sums(self) -> dict[str, tuple[float, float]]:
        """Return seconds forwards and backwards of each layer, in the order of the forward pass."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for span in self.spans:
            sums[span.name][span.is_backward] += span.duration_s
        return {name: (forward_s, backward_s) for name, (forward_s, backward_s) in sums.items()}


@dataclass
class _Stamps:
    """What was stamped: at each, the layer and pass that begin."""

    moments: list[Any] = field(default_factory=list)
    begins: list[tuple[str, bool]] = field(default_factory=list)
    ready: list[tuple[Tensor, int]] = field(default_factory=list)


class LayerTimer:
    """Hooks a model while it is entered; `begin_backward` and `end` stand in the step that is timed.

    Args:
        model: compiled ones have no layers, only gradients.
        clock: of its device.
        sees_layers: whether modules are stamped too, and not only the gradients of parameters.
    """

    def __init__(self, model: nn.Module, clock: Clock, *, sees_layers: bool = True) -> None:
        self._model = model
        self._clock = clock
        self._sees_layers = sees_layers
        self._stamps = _Stamps()
        self._removers: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules() if self._sees_layers else ():
            if not list(module.children()):
                self._hook(_name(name, module), module)
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                register = parameter.register_post_accumulate_grad_hook
                self._removers.append(register(self._accumulated).remove)  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._removers:
            self._removers.pop()()

    def begin_forward(self) -> None:
        """Forget what was stamped, and begin."""
        self._stamps = _Stamps()
        self._stamp(BETWEEN, is_backward=False)

    def begin_backward(self) -> None:
        """The forward pass has ended."""
        self._stamp(LOSS, is_backward=True)

    def end(self) -> LayerTimes:
        """The backward pass has ended; returns what was measured since `begin_forward`."""
        self._stamp("", is_backward=True)
        stamps = self._stamps
        moments_s = self._clock.seconds(stamps.moments)
        spans = [
            LayerSpan(name, is_backward, start_s, end_s - start_s)
            for (name, is_backward), start_s, end_s in zip(stamps.begins, moments_s, moments_s[1:], strict=False)
            if name
        ]
        turn_s = next(span.start_s for span in spans if span.is_backward)
        ready_s = {parameter: moments_s[place] - turn_s for parameter, place in stamps.ready}
        return LayerTimes(spans, turn_s, moments_s[-1] - turn_s, ready_s)

    def _hook(self, name: str, module: nn.Module) -> None:
        inputs_made_by: Collection[Any] = ()

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal inputs_made_by
            # Now: a module that works in place is about to give its input another node.
            inputs_made_by = list(_nodes((*args, *kwargs.values())))
            self._stamp(name, is_backward=False)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            nonlocal inputs_made_by
            self._stamp(BETWEEN, is_backward=False)
            for node in set(_nodes(output)).difference(inputs_made_by):
                node.register_prehook(lambda _: self._stamp(name, is_backward=True))
            inputs_made_by = ()  # a node keeps its whole graph

        self._removers.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        self._removers.append(module.register_forward_hook(after).remove)

    def _accumulated(self, parameter: Tensor) -> None:
        # The layer goes on: only the moment counts.
        name, is_backward = self._stamps.begins[-1]
        self._stamps.ready.append((parameter, len(self._stamps.moments)))
        self._stamp(name, is_backward=is_backward)

    def _stamp(self, name: str, *, is_backward: bool) -> None:
        self._stamps.moments.append(self._clock.stamp())
        self._stamps.begins.append((name, is_backward))


def gradient_bytes(model: nn.Module) -> dict[str, int]:
    """Return the bytes of the gradients of each module's own parameters, by its name.

    Modules without children are all there; of the others those that have parameters themselves. What several share
    counts for the first of them.
    """
    sizes_bytes: dict[str, int] = {}
    seen: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        own = {parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad} - seen
        seen |= own
        if own or not list(module.children()):
            sizes_bytes[_name(name, module)] = sum(each.numel() * each.element_size() for each in own)
    return sizes_bytes


def _name(name: str, module: nn.Module) -> str:
    return name or type(module).__name__


def _nodes(value: Any) -> Iterator[Any]:
    """Yield the node of autograd that made each tensor in a value."""
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield value.grad_fn
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _nodes(each)


def synchronize(device: torch.device) -> None:
    """Wait for everything that was launched on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
