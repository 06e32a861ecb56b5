"""Averages gradients over the ranks while the backward pass still runs.

Parameters are grouped into buckets; a bucket is one flat tensor that is reduced, as one grouped request, as
soon as all its gradients are there. Buckets are packed alike in every run, so equal runs give equal bits.

Invariant: every rank reduces every bucket exactly once per ``finish``, whatever gradients it has: absent ones
count as zeros. So a parameter that one rank does not use cannot make the others wait.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from trainer.buckets import plan_buckets
from trainer.engine.handles import Handle
from trainer.engine.requests import ReduceOp
from trainer.submit import submit_allreduce


@dataclass(frozen=True)
class Reduction:
    """How gradients are combined: operation, and factors before and after it."""

    op: ReduceOp = ReduceOp.AVERAGE
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0


class GradientReducer:
    """Hooks parameters and reduces their gradients in place.

    Args:
        parameters: the same shapes in the same order on every rank.
        names: of each parameter, for messages.
        reduction: the same on every rank.
        passes_per_step: how many backward passes accumulate before a gradient is sent.
        name: the same on every rank and unique among reducers.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        *,
        reduction: Reduction,
        passes_per_step: int,
        name: str,
    ) -> None:
        self.passes_per_step = passes_per_step
        self._parameters = parameters
        self._names = names
        self._num_passes = [0] * len(parameters)
        positions = [i for i, parameter in enumerate(parameters) if parameter.requires_grad]
        plan = plan_buckets(
            [parameters[i].numel() * parameters[i].element_size() for i in positions],
            [(parameters[i].dtype, parameters[i].device) for i in positions],
        )
        self._buckets = [
            _Bucket(
                f"{name}.bucket.{number}",
                {positions[k]: parameters[positions[k]] for k in members},
                reduction,
            )
            for number, members in enumerate(plan)
        ]
        self._bucket_of = {position: bucket for bucket in self._buckets for position in bucket.positions}
        self._hooks = [self._hook(position) for position in self._bucket_of]

    @property
    def covers(self) -> tuple[bool, ...]:
        """For each parameter, whether it was trainable when the buckets were planned."""
        return tuple(position in self._bucket_of for position in range(len(self._parameters)))

    def is_reducing(self) -> bool:
        """Whether a bucket has been sent since the last ``finish``."""
        return any(bucket.handle is not None for bucket in self._buckets)

    def finish(self) -> None:
        """Sends what is not sent yet, waits for all, and leaves the combined gradients in ``grad``.

        Raises:
            HorovodInternalError: ranks disagree on a bucket, or a rank is lost. The gradients are then
                undefined.
        """
        try:
            for bucket in self._buckets:
                if bucket.handle is None:
                    bucket.launch()
            for bucket in self._buckets:
                bucket.collect()
        finally:
            self.reset()

    def reset(self) -> None:
        """Forgets the passes seen; waits for buckets in flight, whose result is dropped."""
        for bucket in self._buckets:
            bucket.drop()
        self._num_passes = [0] * len(self._parameters)

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook(self, position: int) -> RemovableHandle:
        # Weak, so that the hooks of an optimizer that was dropped do nothing when its model is wrapped again.
        reducer = weakref.ref(self)

        def gradient_accumulated(_: Tensor) -> None:
            alive = reducer()
            if alive is not None:
                alive.count_pass(position)

        register = self._parameters[position].register_post_accumulate_grad_hook
        hook: RemovableHandle = register(gradient_accumulated)  # type: ignore[no-untyped-call]  # torch's lack
        return hook

    def count_pass(self, position: int) -> None:
        """Takes note that a backward pass has reached this parameter; the last one completes its gradient.

        Raises:
            AssertionError: there were more passes than announced.
        """
        if self._num_passes[position] >= self.passes_per_step:
            raise AssertionError(
                f"the gradient of '{self._names[position]}' was computed more than backward_passes_per_step "
                f"({self.passes_per_step}) times before optimizer.step(); "
                "increase backward_passes_per_step to accumulate gradients locally"
            )
        self._num_passes[position] += 1
        if self._num_passes[position] == self.passes_per_step:
            self._bucket_of[position].add(position)


class _Bucket:
    """Gradients that travel together: views into one flat tensor, which is allocated once."""

    def __init__(self, name: str, parameters: dict[int, Tensor], reduction: Reduction) -> None:
        self.handle: Handle | None = None
        self._name = name
        self._parameters = parameters
        self._reduction = reduction
        sample = next(iter(parameters.values()))
        lengths = [parameter.numel() for parameter in parameters.values()]
        self._flat = torch.zeros(sum(lengths), dtype=sample.dtype, device=sample.device)
        parts = torch.split(self._flat, lengths)
        self._views = {i: part.view(p.shape) for (i, p), part in zip(parameters.items(), parts, strict=True)}
        self._filled: set[int] = set()

    @property
    def positions(self) -> list[int]:
        return list(self._parameters)

    def add(self, position: int) -> None:
        """Takes a gradient that is complete on this rank; the last one sends the bucket."""
        self._fill(position)
        if len(self._filled) == len(self._parameters):
            self.launch()

    def launch(self) -> None:
        for position in self._parameters.keys() - self._filled:
            self._fill(position)
        self.handle = submit_allreduce(
            [self._flat],
            [self._flat],
            name=self._name,
            op=self._reduction.op,
            prescale_factor=self._reduction.prescale_factor,
            postscale_factor=self._reduction.postscale_factor,
            is_grouped=True,
        )

    def collect(self) -> None:
        assert self.handle is not None
        self.handle.wait()
        for position, parameter in self._parameters.items():
            # A parameter that was frozen meanwhile only stood in for the other ranks' sake.
            if parameter.requires_grad:
                self._give_back(parameter, self._views[position])

    def drop(self) -> None:
        if self.handle is not None:
            self.handle.settle()
        self.handle = None
        self._filled.clear()

    def _fill(self, position: int) -> None:
        gradient, view = self._parameters[position].grad, self._views[position]
        if gradient is None:
            view.zero_()
        elif gradient.layout is not torch.strided:
            raise ValueError("sparse gradients are not supported: build the embedding with sparse=False")
        elif gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
        self._filled.add(position)

    def _give_back(self, parameter: Tensor, view: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.stride() == view.stride():
            # No copy: the gradient lives in the bucket from now on.
            parameter.grad = view
        elif gradient.data_ptr() != view.data_ptr():
            gradient.copy_(view)
