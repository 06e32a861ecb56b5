"""Combines gradients over the ranks while the backward pass still runs.

Parameters are grouped into buckets; each is sent as soon as all its gradients are there. Buckets are planned alike in
every run, so equal runs give equal bits.

Invariant: every rank sends every bucket exactly once per `finish`, whatever gradients it has: absent ones count as
zeros. So a parameter that one rank does not use cannot make the others wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from datasvc.trainer.gradients.buckets import BUCKET_BYTES, plan_groups
from datasvc.trainer.gradients.compression import BF16Compressor, Compression, Compressor, FP16Compressor
from datasvc.trainer.gradients.compression_with_memory import CompressionWithMemory, Memory
from datasvc.trainer.gradients.gradient_bucket import Bucket, DenseBucket, GradientReduction
from datasvc.trainer.gradients.single_gradients import CompressedBucket, SparseGradient
from datasvc.trainer.job import runtime

# These compress while a gradient is copied into the bucket, at no cost; users' own may do anything.
_FLAT_DTYPES: Mapping[type[Compressor], torch.dtype | None] = {
    Compression.none: None,
    FP16Compressor: FP16Compressor.dtype,
    BF16Compressor: BF16Compressor.dtype,
}


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """How gradients travel, the same on every rank.

    Attributes:
        reduction: how they are combined, and among whom.
        compression: as what they travel.
        groups: positions of parameters that travel together.
        sparse_as_dense: whether sparse gradients travel as dense ones; they are sparse again afterwards.
        memory: what the compression remembers of each parameter on this rank.
        sparse: positions of parameters that were found to have sparse gradients, or must have such.
    """

    reduction: GradientReduction
    compression: type[Compressor] | CompressionWithMemory = Compression.none
    groups: Sequence[Sequence[int]] = ()
    sparse_as_dense: bool = False
    memory: Memory = field(default_factory=dict)
    sparse: set[int] = field(default_factory=set)


class GradientReducer:
    """Hooks parameters and combines their gradients in place.

    Args:
        parameters: by position; the same shapes on every rank, in the same order.
        names: of each parameter, for messages.
        exchange: how they travel.
        passes_per_step: how many backward passes accumulate before a gradient is sent.
        name: the same on every rank and unique among reducers.
    """

    def __init__(
        self,
        parameters: Mapping[int, Tensor],
        names: Mapping[int, str],
        *,
        exchange: Exchange,
        passes_per_step: int,
        name: str,
    ) -> None:
        self.passes_per_step = passes_per_step
        self._parameters = parameters
        self._names = names
        self._name = name
        self._exchange = exchange
        self._num_passes = dict.fromkeys(parameters, 0)
        trainable = {i: parameter for i, parameter in parameters.items() if parameter.requires_grad}
        gathered = frozenset() if exchange.sparse_as_dense else exchange.sparse
        self._buckets = self._make_buckets({i: p for i, p in trainable.items() if i not in gathered})
        self._bucket_of = {position: bucket for bucket in self._buckets for position in bucket.parameters}
        for position in trainable.keys() - self._bucket_of.keys():
            self._give_own_bucket(position)
        self._hooks = [self._hook(position) for position in self._bucket_of]

    @property
    def covers(self) -> frozenset[int]:
        """Positions of the parameters that were trainable when the buckets were planned."""
        return frozenset(self._bucket_of)

    def is_reducing(self) -> bool:
        """Whether a bucket has been sent since the last `finish`."""
        return any(bucket.is_launched for bucket in self._buckets)

    def finish(self) -> None:
        """Sends what is not sent yet, waits for all, and leaves the combined gradients in `grad`.

        Raises:
            HorovodInternalError: ranks disagree on a bucket, or a rank is lost. The gradients are then
                undefined.
        """
        try:
            self._launch_rest()
            for bucket in self._buckets:
                bucket.go_on()
            for bucket in self._buckets:
                bucket.collect()
            self._make_sparse_again()
        finally:
            self.reset()

    def reset(self) -> None:
        """Forgets the passes seen; waits for buckets in flight, whose result is dropped."""
        for bucket in self._buckets:
            bucket.drop()
        self._num_passes = dict.fromkeys(self._parameters, 0)

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

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
            self._settle_layout(position)
            self._bucket_of[position].add(position)

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

    def _launch_rest(self) -> None:
        for position, bucket in list(self._bucket_of.items()):
            if not bucket.is_launched:
                self._settle_layout(position)
        for bucket in self._buckets:
            if not bucket.is_launched:
                bucket.launch()

    def _settle_layout(self, position: int) -> None:
        """A sparse gradient becomes a dense one for its journey, or leaves its bucket in all steps to come."""
        parameter = self._parameters[position]
        if parameter.grad is None or parameter.grad.layout is torch.strided:
            return
        if self._exchange.sparse_as_dense:
            parameter.grad = parameter.grad.to_dense()
            self._exchange.sparse.add(position)
        elif position not in self._exchange.sparse:
            self._leave_bucket(position)

    def _make_sparse_again(self) -> None:
        """Gives the optimizer the kind of gradient that the model made: SparseAdam takes no other."""
        if not self._exchange.sparse_as_dense:
            return
        for position in self._exchange.sparse & self._bucket_of.keys():
            parameter = self._parameters[position]
            # By rows, whatever this rank's gradient was like, so that all ranks have the same elements.
            if parameter.requires_grad and parameter.grad is not None:
                parameter.grad = parameter.grad.to_sparse(1)

    def _leave_bucket(self, position: int) -> None:
        bucket = self._bucket_of[position]
        bucket.exclude(position)
        self._exchange.sparse.add(position)
        self._give_own_bucket(position)
        if not bucket.parameters:
            self._buckets.remove(bucket)
        else:
            bucket.launch_if_complete()

    def _give_own_bucket(self, position: int) -> None:
        name = f"{self._name}.sparse.{position}"
        bucket = SparseGradient(name, {position: self._parameters[position]}, self._exchange.reduction)
        self._bucket_of[position] = bucket
        self._buckets.append(bucket)

    def _make_buckets(self, parameters: Mapping[int, Tensor]) -> list[Bucket]:
        positions = list(parameters)
        places = {position: place for place, position in enumerate(positions)}
        plan = plan_groups(
            [parameter.numel() * parameter.element_size() for parameter in parameters.values()],
            [(parameter.dtype, parameter.device) for parameter in parameters.values()],
            [[places[i] for i in group if i in places] for group in self._exchange.groups],
            # Who turns fusion off, or bounds it, means the gradients too.
            bucket_bytes=min(BUCKET_BYTES, runtime.current_job().engine.settings.fusion_bytes),
        )
        return [
            self._make_bucket(number, {positions[place]: parameters[positions[place]] for place in members})
            for number, members in enumerate(plan)
        ]

    def _make_bucket(self, number: int, parameters: Mapping[int, Tensor]) -> Bucket:
        name, exchange = f"{self._name}.bucket.{number}", self._exchange
        compression = exchange.compression
        if isinstance(compression, CompressionWithMemory):
            return compression.make_bucket(name, parameters, exchange.reduction, exchange.memory)
        if compression in _FLAT_DTYPES:
            return DenseBucket(name, parameters, exchange.reduction, dtype=_FLAT_DTYPES[compression])
        return CompressedBucket(name, parameters, exchange.reduction, compression)
