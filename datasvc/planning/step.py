"""The costs of a measured step, part by part, and its duration for three arrangements of the parts.

The model follows Shi, Wang and Chu 2018 (arXiv:1711.05979). `StepCosts` defines the symbols of the parts. T is the
duration of a step of one rank of synchronous data-parallel training. All times are seconds per step.

serial: the parts run one after the other.

    T = t_io + t_h2d + t_n + t_f + t_b + t_l + t_c + t_w + t_u

Three terms are not in the paper: t_n, for the sum of the ranks' numbers of targets, if these can differ; t_l, for the
launch of the all-reduces; and t_w, the wait for the slowest rank.

prefetched: the loader prefetches batches. Over many steps the slower of loader and training determines the duration:

    T = max(t_a, t_i + t_h2d + t_n + t_f + t_b + t_l + t_c + t_w + t_u + t_k),  t_k = k w_io

t_a is the time per batch of the loader alone, and t_i the part of its work in the training thread. The last
paragraph explains t_k. The paper has T = max(t_io + t_h2d, t_f + t_b + t_c), because there the loader thread also
copies the batch to the device. Here the training thread copies the batch, so t_h2d is in the second argument. Both
equations assume that at least one batch is prefetched.

overlapped: all-reduces also run during the backward pass ("wait-free back-propagation"). All-reduces n = 1 ... N are
ordered by r_n, the time from the start of the forward pass until their gradients are complete. They run one at a
time:

    s_n = max(r_n, e_(n-1)),  e_n = s_n + t_c^(n),  e_0 = 0
    t_c^no = max(0, e_N - t_f - t_b)
    T = max(t_a, t_i + t_h2d + t_n + t_f + t_b + t_l + t_c^no + t_w + t_u + t_k)
    t_k = k (w_io + w_c (t_c - t_c^no) / t_c)

With one all-reduce per layer, l = L ... 1, and r = t_f + t_b^(L) + ... + t_b^(l) for layer l, this is the recurrence
of the paper.

The terms with k are not in the paper. They model the competition of threads for processors: w_io and w_c are the
processor times of other threads for a batch and for all all-reduces, and k is the time that the training thread loses
per second of these processor times. With free processors k is 0, and overlapped <= prefetched <= serial. With one
processor for all threads of a rank k is 1, and overlap only uses the time in which that processor would be idle.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from datasvc.errors import ConfigError

# A message may be ready this much after the backward pass ends, because sums in another order round differently.
_ROUNDING_S: Final = 1e-9


@dataclass(frozen=True)
class Message:
    """The gradients of one all-reduce: those of a bucket, or of one layer.

    Attributes:
        size_bytes: size of the gradients.
        ready_s: r: time from the start of the forward pass until all of the gradients are ready.
        reduce_s: t_c of this message: duration of its all-reduce without overlap; 0 for one rank.
    """

    size_bytes: int
    ready_s: float
    reduce_s: float

    def __post_init__(self) -> None:
        if not all(0 <= value < math.inf for value in dataclasses.astuple(self)):
            raise ConfigError(f"{self}; expected finite numbers, not below 0")


@dataclass(frozen=True)
class StepCosts:
    """The costs of one step of one rank, each part without overlap. A description begins with the symbol, if any.

    Attributes:
        io_s: t_io: fetching and decoding a batch without prefetching.
        ahead_s: t_a: time per batch of a prefetching loader that never waits for the training.
        caller_s: t_i: the part of the loader's work that stays in the training thread with prefetching.
        transfer_s: t_h2d: copying the batch to the device, in the training thread.
        forward_s: t_f: the forward passes.
        backward_s: t_b: the backward passes.
        launch_s: t_l: copying gradients into messages and sending them, in the training thread.
        messages: all-reduced messages; t_c is the sum of their times.
        skew_s: t_w: waiting for the slowest rank before an all-reduce; not part of t_c.
        update_s: t_u: the optimizer's step.
        io_beside_s: w_io: processor time of other threads for a batch.
        reduce_beside_s: w_c: processor time of other threads for all messages.
        contention: k: seconds that the training thread loses per second of processor time of other threads.
        targets_s: t_n: summing the numbers of targets of all ranks before the forward pass; 0 if these numbers are
            always equal.
        samples: number of samples of this rank's batch.

    Raises:
        ConfigError: a value is out of range, or contradicts another one.
    """

    io_s: float
    ahead_s: float
    caller_s: float
    transfer_s: float
    forward_s: float
    backward_s: float
    launch_s: float
    messages: tuple[Message, ...]
    skew_s: float
    update_s: float
    io_beside_s: float = 0.0
    reduce_beside_s: float = 0.0
    contention: float = 0.0
    targets_s: float = 0.0
    samples: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # Written with `not 0 <=`, so that NaN is refused too.
            if field.name != "messages" and not 0 <= value < math.inf:
                raise ConfigError(f"{field.name} is {value}; expected a finite number, not below 0")
        if not self.compute_s:
            raise ConfigError("forward_s and backward_s are both 0; expected a step that computes")
        for message in self.messages:
            if message.ready_s > self.compute_s + _ROUNDING_S:
                raise ConfigError(
                    f"{message}; expected to be ready when the backward pass ends, at {self.compute_s} s"
                )
        if max(self.ahead_s, self.caller_s) > self.io_s:
            raise ConfigError(
                f"ahead_s is {self.ahead_s} and caller_s {self.caller_s}; expected at most io_s, {self.io_s}: "
                "a batch takes no longer with prefetching than without"
            )

    @property
    def compute_s(self) -> float:
        """t_f + t_b."""
        return self.forward_s + self.backward_s

    @property
    def device_s(self) -> float:
        """t_i + t_h2d + t_f + t_b + t_l + t_u: the work of the training thread, without waiting."""
        return self.caller_s + self.transfer_s + self.compute_s + self.launch_s + self.update_s

    @property
    def reduce_s(self) -> float:
        """t_c: all messages, one after the other."""
        return sum(message.reduce_s for message in self.messages)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepCosts:
        """Return the costs from their JSON values, which a profile has under "costs".

        Raises:
            ConfigError: a value is missing, unknown or out of range.
        """
        try:
            messages = tuple(Message(**message) for message in values["messages"])
            return cls(**{**values, "messages": messages})
        except (TypeError, KeyError) as error:
            raise ConfigError(f"the values are not the costs of a step, as a profile has them: {error}") from error


class StepMode(StrEnum):
    """Arrangement of the parts of a step."""

    SERIAL = "serial"
    PREFETCHED = "prefetched"
    OVERLAPPED = "overlapped"


def step_time(costs: StepCosts, mode: StepMode) -> float:
    """Return the mean duration of a step in seconds, by the equations of the module."""
    if mode is StepMode.SERIAL:
        # Nothing runs concurrently, so no time is lost to other threads (t_k).
        return costs.io_s + _always_s(costs) + costs.reduce_s
    return max(costs.ahead_s, training_side_s(costs, mode))


def training_side_s(costs: StepCosts, mode: StepMode) -> float:
    """Return the duration of a step in seconds if batches are always ready.

    This is the second argument of the maximum in the equations of the module, so `mode` must not be SERIAL.
    """
    assert mode is not StepMode.SERIAL
    reduce_s = costs.reduce_s if mode is StepMode.PREFETCHED else exposed_reduce_s(costs)
    return costs.caller_s + _always_s(costs) + reduce_s + contention_s(costs, mode)


def contention_s(costs: StepCosts, mode: StepMode) -> float:
    """Return t_k: the seconds per step that the training thread loses to other threads."""
    match mode:
        case StepMode.SERIAL:
            beside_s = 0.0
        case StepMode.PREFETCHED:
            beside_s = costs.io_beside_s
        case StepMode.OVERLAPPED:
            reduce_s = costs.reduce_s
            # The share of the all-reduces that runs during the backward pass. Only this share slows the pass down.
            hidden_share = 1 - exposed_reduce_s(costs) / reduce_s if reduce_s else 0.0
            beside_s = costs.io_beside_s + costs.reduce_beside_s * hidden_share
    return costs.contention * beside_s


def exposed_reduce_s(costs: StepCosts) -> float:
    """Return t_c^no: the seconds of all-reduces after the end of the backward pass."""
    # Limited to reduce_s: the difference can exceed reduce_s by a rounding error, because it adds in another order.
    return min(costs.reduce_s, max(0.0, last_reduced_s(costs.messages) - costs.compute_s))


def last_reduced_s(messages: Iterable[Message]) -> float:
    """Return e_N: the seconds from the start of the forward pass to the end of the last all-reduce; 0 for none."""
    end_s = 0.0
    # One all-reduce runs at a time, in the order in which the gradients become ready.
    for message in sorted(messages, key=lambda message: message.ready_s):
        end_s = max(message.ready_s, end_s) + message.reduce_s
    return end_s


def _always_s(costs: StepCosts) -> float:
    """Return t_h2d + t_n + t_f + t_b + t_l + t_w + t_u, which the training thread needs in every arrangement."""
    until_backward_s = costs.transfer_s + costs.targets_s + costs.compute_s
    return until_backward_s + costs.launch_s + costs.skew_s + costs.update_s
