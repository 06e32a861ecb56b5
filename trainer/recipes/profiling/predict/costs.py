"""The costs of one training step on one rank, part by part: the result of `measure/`, the input of every prediction.

The symbols, such as t_io, are those of Shi, Wang and Chu 2018 (arXiv:1711.05979) and some more, which the module
`step_time` explains. All times are seconds per step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
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
