"""Measures the cost of each layer. The model must not be compiled yet, because compilation hides its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from datasvc.trainer.recipes.optimizers.precision import autocast
from datasvc.trainer.recipes.profiling.measure.layer_times import (
    LayerSpan,
    LayerTimer,
    LayerTimes,
    choose_clock,
    gradient_bytes,
)
from datasvc.trainer.recipes.profiling.measure.profiled_run import PARTS, WALL, ProfiledRun, StepPartTimer
from datasvc.trainer.recipes.update import update

_WARM_UP_STEPS: Final = 2


@dataclass(frozen=True)
class LayerCost:
    """The cost of a module, of the operations between modules, or of the loss.

    `forward_s` and `backward_s` are for all passes of a step.
    """

    name: str
    forward_s: float
    backward_s: float
    gradient_bytes: int


@dataclass(frozen=True)
class Layers:
    """The layers of a step, as this rank measured them.

    Attributes:
        costs: costs of the layers in the order of the forward pass, scaled so that they sum up to a step without
            hooks.
        overhead: relative slowdown of forward and backward pass by the hooks; not contained in `costs`.
        spans: time spans of the last step with hooks, not scaled.
    """

    costs: tuple[LayerCost, ...]
    overhead: float
    spans: tuple[LayerSpan, ...]


def measure_layers(run: ProfiledRun, batch: Any, num_steps: int) -> Layers:
    """Return the costs of layers: means over `num_steps` steps on `batch`. Every rank must call this.

    Hooks slow a pass down. So the same number of steps without hooks is timed too, and the costs are scaled to these.
    """
    run.reduce_during_backward(overlapped=False)
    timer = LayerTimer(run.model, choose_clock(run.device))
    plain, hooked = [], []
    # Alternate, so that other load on the machine slows both kinds of steps equally.
    for _ in range(_WARM_UP_STEPS + num_steps):
        plain.append(_plain_step(run, batch))
        hooked.append(time_pass(run, batch, timer))
    plain, hooked = plain[_WARM_UP_STEPS:], hooked[_WARM_UP_STEPS:]
    # Forward and backward seconds. `plain_s` is for all passes of a step, `hooked_s` for one of its `num_passes`.
    plain_s = np.mean(plain, axis=0)
    hooked_s = np.mean([(times.forward_s, times.backward_s) for times in hooked], axis=0)
    return Layers(
        costs=_layer_costs(hooked, plain_s / hooked_s, gradient_bytes(run.model)),
        overhead=float(hooked_s.sum() * run.batches.num_passes / plain_s.sum() - 1),
        spans=tuple(hooked[-1].spans),
    )


def time_pass(run: ProfiledRun, batch: Any, timer: LayerTimer) -> LayerTimes:
    """Return the layer times of one forward and backward pass, and drop its gradients. Every rank must call this."""
    run.reduce_during_backward(overlapped=False)  # nothing is sent during the pass
    # The first micro-batch, which is what one pass of a step processes.
    examples = next(run.task.unpack(batch, run.device).split(run.batches.micro_batch))
    with timer:
        timer.begin_forward()
        with autocast(run.config.precision, run.device):
            loss = run.task.sum_loss(run.model, examples)
        timer.begin_backward()
        loss.backward()  # type: ignore[no-untyped-call]
        times = timer.end()
    run.reduce_during_backward(overlapped=False)  # resets the count of passes, which this pass increased
    run.optimizer.zero_grad()
    return times


def _plain_step(run: ProfiledRun, batch: Any) -> npt.NDArray[np.float64]:
    """Return the forward and backward seconds of a step without hooks: `float64[2]`."""
    timer = StepPartTimer(run.device)
    update(run, batch, timer.mark)
    forward = PARTS.index("forward")
    return timer.table[forward : forward + 2, WALL]  # "backward" is the part after "forward"


def _layer_costs(
    hooked: Sequence[LayerTimes], scale: npt.NDArray[np.float64], sizes_bytes: dict[str, int]
) -> tuple[LayerCost, ...]:
    """Return the cost of each layer: the mean over passes, scaled so that the layers sum up to a step without hooks.

    Args:
        hooked: times of each pass with hooks.
        scale: factors of the forward and the backward seconds.
        sizes_bytes: gradient bytes by module. A module with gradients that was not timed, such as one with children,
            gets a cost with times of 0.
    """
    sums = [times.sums() for times in hooked]
    untimed = [name for name, size_bytes in sizes_bytes.items() if size_bytes and name not in sums[-1]]
    costs = []
    for name in [*sums[-1], *untimed]:
        # The zeros are for untimed modules, and for modules that did not run in every pass.
        forward_s, backward_s = np.mean([step.get(name, (0.0, 0.0)) for step in sums], axis=0) * scale
        costs.append(LayerCost(name, float(forward_s), float(backward_s), sizes_bytes.get(name, 0)))
    return tuple(costs)
