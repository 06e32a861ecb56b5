"""Weights that change in rounds only, and the optimizer that changes them: the outer part of DiLoCo.

Of each rank, DiLoCo sends the change of the weights since their last round, and takes the mean as the gradient of an
outer step. A round has a start, in which the rank sends, and an end, in which its weights change; with a delay the
rank makes steps in between. `sync_policy` says when.

Invariant: what a state needs of a round that has started is this rank's own: the change that it has sent. A state is
taken without a message to other ranks, and a rank that loads it sends the same change again, to the same mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from datasvc.trainer.errors import HorovodInternalError
from datasvc.trainer.gradients.compression_with_memory import Memory, copy_memory
from datasvc.trainer.gradients.gradient_bucket import Bucket, DenseBucket, GradientReduction
from datasvc.trainer.gradients.quantized import Quantized
from datasvc.trainer.job import runtime
from datasvc.trainer.job.process_sets import ProcessSet
from datasvc.trainer.optim.sync_policy import SyncPolicy

# As in the paper.
_RATE, _MOMENTUM = 0.7, 0.9


class OuterOptimizer:
    """The weights of DiLoCo's outer optimizer, or the center of EASGD, which uses only `weights`.

    Args:
        weights: weights to copy, in 32 bits if they have 16; each call gets those of the same parameters, in the
            same order.
        policy: when rounds start and end.
        name: name of the operations, the same on every rank of the set.
        fragments: positions of the weights of each fragment, see `cut_fragments`.
        process_set: ranks that average.

    Attributes:
        has_changed_weights: whether the last round changed the weights. One without changes to send does not: they
            were lost with another number of ranks.
    """

    def __init__(
        self,
        weights: list[Tensor],
        policy: SyncPolicy,
        name: str,
        fragments: Sequence[range],
        process_set: ProcessSet,
    ) -> None:
        # In 16 bits, changes below half of the last bit would be lost in every round.
        self.weights = [
            weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True).requires_grad_()
            for weight in weights
        ]
        self._policy = policy
        self._name = name
        self._fragments = fragments
        self._set = process_set
        self._optimizer = torch.optim.SGD(self.weights, lr=_RATE, momentum=_MOMENTUM, nesterov=True)
        self._memory: Memory = {}  # of the codec
        # Of the round in progress: what this rank sends, by position, and the messages, which a loaded state lacks.
        self._changes: dict[int, Tensor] = {}
        self._buckets: list[Bucket] = []
        self._has_sent_sums = True
        self.has_changed_weights = True
        self._has_compared = False  # whether ranks with other outer weights would have had an error

    def compared_text(self, text: str) -> str:
        """Return the text of a round, which all ranks compare; of the first one, with a checksum of the weights.

        All ranks add the same to their outer weights, so no round makes those equal that are not equal at first.
        """
        if self._has_compared:
            return text
        self._has_compared = True
        sums = [_sum_bits(weight.detach()) for weight in self.weights]
        return f"{text}, which begins with weights of the checksum {sum(sums) % (1 << 64):016x}"

    def before_step(self, step: int) -> None:
        """Send again what a loaded state had sent. `step` is the number of steps so far."""
        if self._changes and not self._buckets:
            self._send(step)

    def after_step(self, step: int, weights: list[Tensor]) -> None:
        """Start the round that is due after this step, or end it and change the weights."""
        if self._policy.starts_round(step):
            # The number of the round alone chooses the fragment, so all ranks send the same one.
            fragment = self._fragments[self._policy.last_round(step) % len(self._fragments)]
            self._changes = {position: self._change_of(position, weights[position]) for position in fragment}
            self._send(step)
        # A codec has two messages. Send the second in the middle of the delay, so that neither makes the ranks wait.
        if -step % self._policy.round_steps <= self._policy.delay // 2:
            self._send_sums()
        if self._policy.is_round(step):
            self._end_round(weights)

    def make_round(self, step: int, weights: list[Tensor], *, weight: float) -> None:
        """Make a whole round after this step, in which the change of this rank counts `weight` times."""
        self._changes = {
            position: self._change_of(position, own).mul_(weight) for position, own in enumerate(weights)
        }
        self._send(step)
        self._send_sums()
        self._end_round(weights)

    def _change_of(self, position: int, weight: Tensor) -> Tensor:
        outer = self.weights[position].detach()
        # From where the rank has begun: rounding the outer weight to 16 bits is no change that it has made.
        return outer.to(weight.dtype).to(outer.dtype) - weight

    def _send(self, step: int) -> None:
        policy = self._policy
        # Without the numbers of steps: each rank may make steps of its own number in a round.
        text = f"round {policy.last_round(step)} of diloco, fragments={policy.fragments}, codec={policy.codec}"
        reduction = GradientReduction(round=self.compared_text(text), process_set=self._set)
        for position, change in self._changes.items():
            self.weights[position].grad = change
        groups = group_alike({position: self.weights[position] for position in self._changes})
        for number, group in enumerate(groups):
            # All fragments have one name. So ranks in different rounds get an error, and do not wait for each other.
            name = f"{self._name}.mean.{number}"
            bucket: Bucket
            if policy.codec is None:
                bucket = DenseBucket(name, group, reduction)
            else:
                bucket = Quantized(policy.codec).make_bucket(name, group, reduction, self._memory)
            bucket.launch()
            self._buckets.append(bucket)
        self._has_sent_sums = False

    def _send_sums(self) -> None:
        if not self._has_sent_sums:
            for bucket in self._buckets:
                bucket.send_second()
            self._has_sent_sums = True

    def _end_round(self, weights: list[Tensor]) -> None:
        for bucket in self._buckets:
            bucket.collect()
        self._optimizer.step()  # changes only weights with a gradient: those of this fragment
        self._optimizer.zero_grad()
        self.has_changed_weights = bool(self._changes)
        for position in self._changes:
            outer, own = self.weights[position].detach(), weights[position]
            own.copy_(torch.lerp(outer, own.to(outer.dtype), self._policy.alpha) if self._policy.alpha else outer)
        self._buckets, self._changes = [], {}

    def state_dict(self) -> dict[str, Any]:
        """Return the weights, the state of the outer optimizer, and what this rank has of the codec and the round."""
        return {
            "weights": [weight.detach() for weight in self.weights],
            "optimizer": self._optimizer.state_dict(),
            "memory": copy_memory(self._memory, residuals=True),
            "rank": runtime.rank(),
            "changes": dict(self._changes),
            "has_changed_weights": self.has_changed_weights,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; the residuals of a codec only if this rank has saved them, so that none counts twice.

        Raises:
            ValueError: the state is that of other parameters.
        """
        shapes, saved_shapes = (
            [tuple(each.shape) for each in weights] for weights in (self.weights, state["weights"])
        )
        if shapes != saved_shapes:
            raise ValueError(
                f"the state has outer weights of {len(saved_shapes)} parameters, of shapes {saved_shapes}, but these "
                f"have {shapes}: freeze the parameters that were frozen when it was saved"
            )
        for weight, saved in zip(self.weights, state["weights"], strict=True):
            weight.detach().copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        for position, values in copy_memory(state["memory"], residuals=state["rank"] == runtime.rank()).items():
            device = self.weights[position].device
            self._memory[position] = {
                name: value.to(device) if isinstance(value, Tensor) else value for name, value in values.items()
            }
        self._changes = {
            # A state of an earlier release has changes of 16 bits.
            position: change.to(self.weights[position].device, self.weights[position].dtype, copy=True)
            for position, change in state["changes"].items()
        }
        self.has_changed_weights = state.get("has_changed_weights", True)  # states of earlier releases lack it

    def drop(self) -> None:
        """Wait for the messages of the round in progress, and discard them. Every rank calls this."""
        with contextlib.suppress(HorovodInternalError):  # a rank was lost, so there are no messages to wait for
            self._send_sums()
        for bucket in self._buckets:
            bucket.drop()
        self._buckets, self._changes = [], {}


def _sum_bits(tensor: Tensor) -> int:
    """Return the sum of the bits of the elements, as integers: independent of the order, unlike that of floats."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return int(real.view(torch.int32 if real.element_size() == 4 else torch.int64).sum())


def group_alike(tensors: Mapping[int, Tensor]) -> list[dict[int, Tensor]]:
    """Return tensors in groups of one dtype and device, by position."""
    groups: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}
    for position, tensor in tensors.items():
        groups.setdefault((tensor.dtype, tensor.device), {})[position] = tensor
    return list(groups.values())
