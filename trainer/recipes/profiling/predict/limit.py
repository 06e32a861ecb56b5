"""Finds the resource that limits training: data, computation, communication, or the processors that these share.

The last line of a printed profile is this result.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from datasvc.trainer.recipes.profiling.predict.costs import StepCosts
from datasvc.trainer.recipes.profiling.predict.step_time import (
    StepMode,
    contention_s,
    exposed_reduce_s,
    training_side_s,
)

# If the training thread loses more than this share of its time to concurrent threads, the processors are the limit.
_MAX_CONTENTION: Final = 0.2


class Bound(StrEnum):
    """A limiting resource."""

    DATA = "data"
    COMPUTE = "compute"
    COMMUNICATION = "communication"
    PROCESSORS = "processors"


@dataclass(frozen=True)
class StepLimit:
    """The limit of a run in the mode "overlapped": with prefetching, and with all-reduces during the backward pass.

    Attributes:
        bound: the limiting resource.
        inequality: the comparison of times that decided, in milliseconds.
        advice: how to raise the limit.
    """

    bound: Bound
    inequality: str
    advice: str

    def __str__(self) -> str:
        return f"{self.bound}-bound: {self.inequality}; {self.advice}"


def find_limit(costs: StepCosts) -> StepLimit:
    """Return the resource that limits training, by the first of these conditions that holds.

    The module `step_time` defines the symbols.

    - Data: t_a > t_i + t_h2d + t_f + t_b + t_l + t_u + t_n + t_c^no + t_w + t_k. The loader needs more time for a
      batch than the training thread needs for a step.
    - Communication: t_c > t_i + t_h2d + t_f + t_b + t_l + t_u. The all-reduces take longer than the work of the
      training thread, so even a perfect overlap cannot hide them.
    - Processors: t_k, the time lost to concurrent threads, is more than a fifth of the training thread's time.
    - Computation: otherwise.
    """
    training_s, lost_s = training_side_s(costs, StepMode.OVERLAPPED), contention_s(costs, StepMode.OVERLAPPED)
    device_s = costs.caller_s + costs.transfer_s + costs.compute_s + costs.launch_s + costs.update_s
    device = _format_sum(
        t_i=costs.caller_s,
        t_h2d=costs.transfer_s,
        t_f=costs.forward_s,
        t_b=costs.backward_s,
        t_l=costs.launch_s,
        t_u=costs.update_s,
    )
    # Show t_n only for tasks that sum their targets.
    targets = {"t_n": costs.targets_s} if costs.targets_s else {}
    exposed = _format_sum(**targets, **{"t_c^no": exposed_reduce_s(costs)}, t_w=costs.skew_s, t_k=lost_s)
    training = f"{device} + {exposed} = {training_s * 1e3:.2f} ms"
    ahead, reduce = _format_sum(t_a=costs.ahead_s), _format_sum(t_c=costs.reduce_s)
    # Check data first, because nothing else limits training as long as it waits for batches.
    if costs.ahead_s > training_s:
        advice = "run the training with --profile to find the slow stage of the loader"
        return StepLimit(Bound.DATA, f"{ahead} > {training}", advice)
    if costs.reduce_s > device_s:
        advice = "larger batches, compression, or faster links"
        return StepLimit(Bound.COMMUNICATION, f"{reduce} > {device} = {device_s * 1e3:.2f} ms; {ahead}", advice)
    if lost_s > _MAX_CONTENTION * training_s:
        inequality = f"{_format_sum(t_k=lost_s)} > {_MAX_CONTENTION:.0%} of {training}; {ahead}"
        return StepLimit(Bound.PROCESSORS, inequality, "more processors, or decoding on the GPU")
    return StepLimit(Bound.COMPUTE, f"{training} >= {ahead}, {reduce}", "mixed precision, or more ranks")


def _format_sum(**terms_s: float) -> str:
    """Return a sum with symbols, in milliseconds: "t_f 12.00 + t_b 24.00"."""
    return " + ".join(f"{symbol} {seconds * 1e3:.2f}" for symbol, seconds in terms_s.items())
