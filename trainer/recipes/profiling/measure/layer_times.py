"""Measures how long each layer takes forward and backward, and when each parameter's gradient is ready.

Modules without children are stamped before and after their forward pass. In the backward pass a stamp is taken when
autograd reaches the node that created a module's output. The time until the next stamp counts for that module,
including operations outside of modules, such as an addition. A module that returns its input, such as an identity,
creates no node and has no backward time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

BETWEEN: Final = "(between modules)"
LOSS: Final = "(loss)"


class HostClock:
    """The clock of the CPU, where work completes before the call returns."""

    def stamp(self) -> Any:
        """Return a stamp of the time at which all work launched so far has completed."""
        return time.perf_counter()

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """Return the seconds from the first stamp to each stamp; wait until the device has reached the last one."""
        return [stamp - stamps[0] for stamp in stamps]


class DeviceClock(HostClock):
    """The clock of a GPU, which runs launched work later, in order: events in its stream do not block the host."""

    def stamp(self) -> Any:
        """See `HostClock`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here
        event.record()
        return event

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """See `HostClock`."""
        stamps[-1].synchronize()
        return [stamps[0].elapsed_time(stamp) * 1e-3 for stamp in stamps]


def choose_clock(device: torch.device) -> HostClock:
    """Return the clock of a device."""
    return DeviceClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class LayerSpan:
    """A time span of the module `name`, `BETWEEN` or `LOSS`; `start_s` counts from the start of the forward pass."""

    name: str
    is_backward: bool
    start_s: float
    duration_s: float


@dataclass
class LayerTimes:
    """The times of one forward and one backward pass.

    Attributes:
        spans: time spans in the order of execution.
        forward_s: duration of the forward pass.
        backward_s: duration of the backward pass.
        ready_s: for each parameter with a gradient: time from the start of the backward pass until it was ready.
    """

    spans: list[LayerSpan]
    forward_s: float
    backward_s: float
    ready_s: dict[Tensor, float]

    def sums(self) -> dict[str, tuple[float, float]]:
        """Return the forward and backward seconds of each layer, in the order of the forward pass."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for span in self.spans:
            sums[span.name][span.is_backward] += span.duration_s
        return {name: (forward_s, backward_s) for name, (forward_s, backward_s) in sums.items()}


@dataclass
class _Stamps:
    """Stamps of both passes, and for each stamp the layer that begins there and whether its backward pass begins.

    `ready` has each parameter whose gradient is ready, with the index of its stamp.
    """

    moments: list[Any] = field(default_factory=list)
    begins: list[tuple[str, bool]] = field(default_factory=list)
    ready: list[tuple[Tensor, int]] = field(default_factory=list)


class LayerTimer:
    """Context that adds hooks to a model. The timed step calls `begin_forward`, `begin_backward` and `end`.

    Args:
        model: model to time; in a compiled model only the gradients can be timed.
        clock: clock of the model's device.
        sees_layers: whether to time modules too, not only the gradients of parameters.
    """

    def __init__(self, model: nn.Module, clock: HostClock, *, sees_layers: bool = True) -> None:
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
        """Drop earlier stamps and start the forward pass."""
        self._stamps = _Stamps()
        self._stamp(BETWEEN, is_backward=False)

    def begin_backward(self) -> None:
        """Mark the end of the forward pass and the start of the backward pass."""
        self._stamp(LOSS, is_backward=True)

    def end(self) -> LayerTimes:
        """Mark the end of the backward pass; return the times since `begin_forward`."""
        self._stamp("", is_backward=True)  # ends the last span, and begins none
        stamps = self._stamps
        moments_s = self._clock.seconds(stamps.moments)
        spans = [
            LayerSpan(name, is_backward, start_s, end_s - start_s)
            for (name, is_backward), start_s, end_s in zip(stamps.begins, moments_s, moments_s[1:], strict=False)
            if name
        ]
        backward_start_s = next(span.start_s for span in spans if span.is_backward)
        ready_s = {parameter: moments_s[place] - backward_start_s for parameter, place in stamps.ready}
        return LayerTimes(spans, backward_start_s, moments_s[-1] - backward_start_s, ready_s)

    def _hook(self, name: str, module: nn.Module) -> None:
        inputs_made_by: Collection[Any] = ()

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal inputs_made_by
            # Recorded before the call, because a module that works in place replaces the node of its input.
            inputs_made_by = list(_nodes((*args, *kwargs.values())))
            self._stamp(name, is_backward=False)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            nonlocal inputs_made_by
            self._stamp(BETWEEN, is_backward=False)
            for node in set(_nodes(output)).difference(inputs_made_by):
                # Hook the node, because torch's backward hook of a module forbids in-place changes of the
                # activations.
                node.register_prehook(lambda _: self._stamp(name, is_backward=True))
            inputs_made_by = ()  # release the nodes, because a node keeps its whole graph alive

        self._removers.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        self._removers.append(module.register_forward_hook(after).remove)

    def _accumulated(self, parameter: Tensor) -> None:
        # The stamp begins the same layer once more: the layer has not ended when one of its gradients is ready.
        name, is_backward = self._stamps.begins[-1]
        self._stamps.ready.append((parameter, len(self._stamps.moments)))
        self._stamp(name, is_backward=is_backward)

    def _stamp(self, name: str, *, is_backward: bool) -> None:
        self._stamps.moments.append(self._clock.stamp())
        self._stamps.begins.append((name, is_backward))


def gradient_bytes(model: nn.Module) -> dict[str, int]:
    """Return the gradient bytes of each module's own parameters, by module name.

    Modules without children are always listed, others only if they have parameters of their own. A shared parameter
    counts for the first module that has it.
    """
    sizes_bytes: dict[str, int] = {}
    seen: set[nn.Parameter] = set()
    # Modules with children are included, because they can have parameters of their own.
    for name, module in model.named_modules():
        own = {parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad} - seen
        seen |= own
        if own or not list(module.children()):
            sizes_bytes[_name(name, module)] = sum(weight.numel() * weight.element_size() for weight in own)
    return sizes_bytes


def _name(name: str, module: nn.Module) -> str:
    return name or type(module).__name__


def _nodes(value: Any) -> Iterator[Any]:
    """Yield the autograd node that created each tensor in a value."""
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield value.grad_fn
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nodes(item)


def synchronize(device: torch.device) -> None:
    """Wait for all work launched on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
