"""Measures how long each layer takes forward and backward, and when each parameter's gradient is ready.

A layer is a module without children. Hooks take a stamp of the time before and after its forward pass. In the
backward pass, a hook takes a stamp when autograd reaches the node that created the layer's output. The time from this
stamp to the next one counts for the layer, even if operations outside of layers, such as an addition, are part of it.
A layer that returns its input, such as an identity, creates no node and has no backward time.
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

# Names of the spans that belong to no module.
BETWEEN: Final = "(between modules)"
LOSS: Final = "(loss)"


class HostClock:
    """The clock of the CPU. On a CPU, a call of an operation returns only when its work has completed."""

    def stamp(self) -> Any:
        """Return a stamp: the time at which all work launched so far has completed."""
        return time.perf_counter()

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """Wait until the last stamp is taken; return the seconds from the first stamp to each stamp."""
        return [stamp - stamps[0] for stamp in stamps]


class DeviceClock(HostClock):
    """The clock of a GPU. A stamp is an event in the stream of work, so taking a stamp does not block the host."""

    def stamp(self) -> Any:
        """Return an event that the GPU records when it has completed all work launched so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here
        event.record()
        return event

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """Return the seconds as `HostClock` does."""
        stamps[-1].synchronize()  # the stream runs in order, so the earlier events are recorded too
        return [stamps[0].elapsed_time(stamp) * 1e-3 for stamp in stamps]  # elapsed_time is in milliseconds


def choose_clock(device: torch.device) -> HostClock:
    """Return the clock of a device."""
    return DeviceClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class LayerSpan:
    """A time span; `name` is a layer, `BETWEEN` or `LOSS`; `start_s` counts from the start of the forward pass."""

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
        ready_s: for each parameter, the time from the start of the backward pass until its gradient was ready.
    """

    spans: list[LayerSpan]
    forward_s: float
    backward_s: float
    ready_s: dict[Tensor, float]

    def sums(self) -> dict[str, tuple[float, float]]:
        """Return the forward and backward seconds of each name in `spans`, in the order of the forward pass."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # indexed by `is_backward`
        for span in self.spans:
            sums[span.name][span.is_backward] += span.duration_s
        return {name: (forward_s, backward_s) for name, (forward_s, backward_s) in sums.items()}


@dataclass
class _Stamps:
    """The stamps of a forward and a backward pass.

    Attributes:
        moments: stamps of the clock.
        begins: for each stamp, the name and `is_backward` of the span from it to the next stamp.
        ready: each parameter whose gradient is ready, with the index of the stamp of that time.
    """

    moments: list[Any] = field(default_factory=list)
    begins: list[tuple[str, bool]] = field(default_factory=list)
    ready: list[tuple[Tensor, int]] = field(default_factory=list)


class LayerTimer:
    """Context that times a forward and a backward pass. The model has hooks only inside it.

    Inside, the caller runs the passes, and calls `begin_forward`, `begin_backward` and `end` around them.

    Args:
        model: model to time.
        clock: clock of the model's device.
        sees_layers: whether to time layers too, not only the gradients of parameters; must be False for a compiled
            model, which does not call its layers one by one.
    """

    def __init__(self, model: nn.Module, clock: HostClock, *, sees_layers: bool = True) -> None:
        self._model = model
        self._clock = clock
        self._sees_layers = sees_layers
        self._stamps = _Stamps()
        self._removers: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        if self._sees_layers:
            for name, module in self._model.named_modules():
                if not list(module.children()):
                    self._add_hooks(_display_name(name, module), module)
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                register = parameter.register_post_accumulate_grad_hook
                self._removers.append(register(self._mark_ready).remove)  # type: ignore[no-untyped-call]
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
            # The third sequence is shorter by one: the last stamp begins no span.
            for (name, is_backward), start_s, end_s in zip(stamps.begins, moments_s, moments_s[1:], strict=False)
            if name
        ]
        backward_start_s = next(span.start_s for span in spans if span.is_backward)
        ready_s = {parameter: moments_s[index] - backward_start_s for parameter, index in stamps.ready}
        return LayerTimes(spans, backward_start_s, moments_s[-1] - backward_start_s, ready_s)

    def _add_hooks(self, name: str, module: nn.Module) -> None:
        """Add hooks that take stamps before and after the forward pass of a module, and before its backward pass."""
        input_nodes: Collection[Any] = ()

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal input_nodes
            # Recorded before the call, because a module that works in place replaces the node of its input.
            input_nodes = list(_creators((*args, *kwargs.values())))
            self._stamp(name, is_backward=False)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            nonlocal input_nodes
            self._stamp(BETWEEN, is_backward=False)
            # Leave out nodes of inputs: an identity returns its input, which another module has created.
            for node in set(_creators(output)).difference(input_nodes):
                # torch's backward hook of a module would forbid in-place changes of its output, so hook the node.
                node.register_prehook(lambda _: self._stamp(name, is_backward=True))
            input_nodes = ()  # a node would keep its whole graph in memory

        self._removers.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        self._removers.append(module.register_forward_hook(after).remove)

    def _mark_ready(self, parameter: Tensor) -> None:
        """Record that the gradient of a parameter is ready."""
        # The current span ends at this stamp, but its layer may still run. So begin another span of this layer.
        name, is_backward = self._stamps.begins[-1]
        self._stamps.ready.append((parameter, len(self._stamps.moments)))
        self._stamp(name, is_backward=is_backward)

    def _stamp(self, name: str, *, is_backward: bool) -> None:
        self._stamps.moments.append(self._clock.stamp())
        self._stamps.begins.append((name, is_backward))


def gradient_bytes(model: nn.Module) -> dict[str, int]:
    """Return the gradient bytes of each module's own parameters, by module name.

    Modules without children are always listed, others only if they have parameters of their own. A shared parameter
    counts only for the first module that has it.
    """
    sizes_bytes: dict[str, int] = {}
    counted: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        own = {parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad} - counted
        counted |= own
        if own or not list(module.children()):
            sizes_bytes[_display_name(name, module)] = sum(weight.numel() * weight.element_size() for weight in own)
    return sizes_bytes


def _display_name(name: str, module: nn.Module) -> str:
    """Return the name of a module in its model; for the model itself, whose name is "", its class."""
    return name or type(module).__name__


def _creators(value: Any) -> Iterator[Any]:
    """Yield the autograd node that created each tensor in a value, which may be nested lists and tuples."""
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield value.grad_fn
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _creators(item)


def synchronize(device: torch.device) -> None:
    """Wait until a device has completed all launched work. On a CPU, it is complete already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
