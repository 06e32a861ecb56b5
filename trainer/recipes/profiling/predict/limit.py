"""Tells what limits training: data, computation, communication, or the processors that all three share."""

from __future__ import annotations

from collections.abc import Mapping
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

_NOT_FREE: Final = 0.2


class Bound(StrEnum):
    """A limiting resource."""

    DATA = "data"
    COMPUTE = "compute"
    COMMUNICATION = "communication"
    PROCESSORS = "processors"


@dataclass(frozen=True)
class StepLimit:
    """The limit of a run with a prefetching loader and all-reduces during the backward pass.

    Attributes:
        bound: the limiting resource.
        inequality: the reason, with numbers in milliseconds.
        advice: how to raise the limit.
    """

    bound: Bound
    inequality: str
    advice: str

    def __str__(self) -> str:
        return f"{self.bound}-bound: {self.inequality}; {self.advice}"


def judge(costs: StepCosts) -> StepLimit:
    """Return what limits training.

    The data do if t_a is more than all that the training thread does: t_i + t_h2d + t_f + t_b + t_l + t_u + t_n +
    t_c^no + t_w + t_k, with t_k what it loses to work beside it. Communication does if t_c > t_i + t_h2d + t_f +
    t_b + t_l + t_u: the links are busy for longer than the device, however well the two overlap. The processors do if
    t_k is more than a fifth of a step: then what is hidden is not free. Otherwise computation does.
    """
    side_s, beside_s = training_side_s(costs, StepMode.OVERLAPPED), contention_s(costs, StepMode.OVERLAPPED)
    device_s = costs.caller_s + costs.transfer_s + costs.compute_s + costs.launch_s + costs.update_s
    device = _sum(
        {
            "t_i": costs.caller_s,
            "t_h2d": costs.transfer_s,
            "t_f": costs.forward_s,
            "t_b": costs.backward_s,
            "t_l": costs.launch_s,
            "t_u": costs.update_s,
        }
    )
    targets = {"t_n": costs.targets_s} if costs.targets_s else {}
    rest = _sum({**targets, "t_c^no": exposed_reduce_s(costs), "t_w": costs.skew_s, "t_k": beside_s})
    ahead, reduce, side = (_sum({"t_a": costs.ahead_s}), _sum({"t_c": costs.reduce_s}), f"{side_s * 1e3:.2f} ms")
    if costs.ahead_s > side_s:
        advice = "a training run with --profile says which stage of the loader it is"
        return StepLimit(Bound.DATA, f"{ahead} > {device} + {rest} = {side}", advice)
    if costs.reduce_s > device_s:
        advice = "larger batches, compression, or faster links"
        return StepLimit(Bound.COMMUNICATION, f"{reduce} > {device} = {device_s * 1e3:.2f} ms; {ahead}", advice)
    if beside_s > _NOT_FREE * side_s:
        inequality = f"t_k {beside_s * 1e3:.2f} > {_NOT_FREE:.0%} of {device} + {rest} = {side}; {ahead}"
        return StepLimit(Bound.PROCESSORS, inequality, "more processors, or decoding on the GPU")
    return StepLimit(
        Bound.COMPUTE, f"{device} + {rest} = {side} >= {ahead}, {reduce}", "mixed precision, or more ranks"
    )


def _sum(terms: Mapping[str, float]) -> str:
    return " + ".join(f"{symbol} {seconds * 1e3:.2f}" for symbol, seconds in terms.items())
