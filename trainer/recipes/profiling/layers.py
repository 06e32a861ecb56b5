"""Measures the layers of a step, and what it sends. Every rank calls this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trainer.recipes.precision import autocast
from trainer.recipes.profiling.clocks import choose_clock
from trainer.recipes.profiling.costs import LayerCost
from trainer.recipes.profiling.layer_times import LayerSpan, LayerTimer, LayerTimes, gradient_bytes
from trainer.recipes.profiling.messages import Bucket, measure_all_reduce, measure_buckets
from trainer.recipes.profiling.parts import Parts
from trainer.recipes.profiling.timed_step import PARTS, WALL, StepTimer

_MESSAGE_REPEATS: Final = 7
_WARM_UP_STEPS: Final = 2


@dataclass(frozen=True)
class Layers:
    """The layers of a step, as this rank measured them.

    Attributes:
        costs: of each, in the order of the forward pass; their sums are those of a step without hooks.
        buckets: what is all-reduced.
        message_s: of an all-reduce of a single number: what each costs whatever its size.
        overhead: by how much hooks made the two passes longer, as a share; taken out of `costs`.
        spans: of the last step with hooks, as they were.
    """

    costs: tuple[LayerCost, ...]
    buckets: tuple[Bucket, ...]
    message_s: float
    overhead: float
    spans: tuple[LayerSpan, ...]


def measure_layers(parts: Parts, batch: Any, num_steps: int) -> Layers:
    """Return what layers and messages cost: means over steps on one batch, in turn with hooks and without."""
    parts.sends_beside(beside=False)
    for _ in range(_WARM_UP_STEPS):
        parts.step(batch)
        _hooked_step(parts, batch)
    plain, hooked = [], []
    for _ in range(num_steps):
        plain.append(_plain_step(parts, batch))
        hooked.append(_hooked_step(parts, batch))
    # The hooked step is one pass of several.
    bare_s = np.mean(plain, axis=0)
    hooked_s = np.mean([(times.forward_s, times.backward_s) for times in hooked], axis=0)
    trained = [p for group in parts.optimizer.param_groups for p in group["params"] if p.requires_grad]
    return Layers(
        costs=_layer_costs(hooked, bare_s / hooked_s, gradient_bytes(parts.model)),
        buckets=tuple(measure_buckets(trained, _ready_shares(hooked), repeats=_MESSAGE_REPEATS)),
        message_s=measure_all_reduce(1, trained[0], repeats=_MESSAGE_REPEATS),
        overhead=float(hooked_s.sum() * parts.batches.num_passes / bare_s.sum() - 1),
        spans=tuple(hooked[-1].spans),
    )


def _plain_step(parts: Parts, batch: Any) -> npt.NDArray[np.float64]:
    """Return the seconds forwards and backwards of a step without hooks."""
    timer = StepTimer(parts.device)
    parts.step(batch, timer.mark)
    forward = PARTS.index("forward")
    return timer.table[forward : forward + 2, WALL]


def _hooked_step(parts: Parts, batch: Any) -> LayerTimes:
    """Return the layers of one forward and backward pass, whose gradients go nowhere."""
    examples = next(parts.task.unpack(batch, parts.device).split(parts.batches.micro_batch))
    with LayerTimer(parts.model, choose_clock(parts.device)) as timer:
        timer.begin_forward()
        with autocast(parts.config.precision, parts.device):
            loss = parts.task.sum_loss(parts.model, examples)
        timer.begin_backward()
        loss.backward()  # type: ignore[no-untyped-call]
        times = timer.end()
    parts.sends_beside(beside=False)  # forgets this pass
    parts.optimizer.zero_grad()
    return times


def _layer_costs(
    hooked: Sequence[LayerTimes], scale: npt.NDArray[np.float64], sizes_bytes: dict[str, int]
) -> tuple[LayerCost, ...]:
    """Return the mean of each layer, scaled so that they sum up to the passes without hooks."""
    sums = [times.sums() for times in hooked]
    costs = []
    for name in sums[-1]:
        forward_s, backward_s = np.mean([each.get(name, (0.0, 0.0)) for each in sums], axis=0) * scale
        costs.append(LayerCost(name, float(forward_s), float(backward_s), sizes_bytes.get(name, 0)))
    return tuple(costs)


def _ready_shares(hooked: Sequence[LayerTimes]) -> dict[Tensor, float]:
    """Return when each parameter's gradient was there, as a share of the backward pass."""
    return {
        parameter: min(1.0, float(np.mean([times.ready_s[parameter] / times.backward_s for times in hooked])))
        for parameter in hooked[-1].ready_s
    }
