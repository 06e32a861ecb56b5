"""Reduction of gradients over the ranks during the backward pass; the core of `DistributedOptimizer`.

Parameters are grouped into buckets; a bucket is sent as soon as all its gradients are complete. With a fixed
maximum size, the buckets are the same in every run, so equal runs give equal bits. With "auto", the size depends on
measurements, so runs can differ in the last bits.

Invariant: every rank sends every bucket exactly once per `finish`, with zeros for missing gradients. A parameter that
one rank does not use therefore cannot make the other ranks wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from datasvc.trainer.gradients.bucket_choice import BUCKET_BYTES, plan_groups
from datasvc.trainer.gradients.bucket_tuner import BucketTuner
from datasvc.trainer.gradients.compression import BF16Compressor, Compression, Compressor, FP16Compressor
from datasvc.trainer.gradients.compression_with_memory import CompressionWithMemory, Memory
from datasvc.trainer.gradients.gradient_bucket import Bucket, DenseBucket, GradientReduction
from datasvc.trainer.gradients.single_gradients import CompressedBucket, SparseGradient
from datasvc.trainer.job import runtime

# The compressors that only convert the dtype, with the dtype of their `DenseBucket`. None is the parameters' dtype.
# The copy into the bucket does the conversion. Any other compressor needs a `CompressedBucket`.
FLAT_DTYPES: Mapping[type[Compressor], torch.dtype | None] = {
    Compression.none: None,
    FP16Compressor: FP16Compressor.dtype,
    BF16Compressor: BF16Compressor.dtype,
}


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The settings of the gradient reduction, the same on every rank, and its state on this rank.

    Attributes:
        reduction: reduction, and the ranks that take part.
        compression: compression of the gradients.
        groups: groups of positions of parameters in the optimizer; the gradients of a group are sent together.
        sparse_as_dense: whether sparse gradients are sent as dense tensors and converted back.
        memory: what a compression with memory keeps between steps on this rank.
        sparse: positions of parameters that have had a sparse gradient, or always have one; extended during training.
        bucket_bytes: maximum size of a bucket; also until `tuner` has made its choice.
        tuner: chooses the size of buckets in the first steps; None to keep `bucket_bytes`.
    """

    reduction: GradientReduction
    compression: type[Compressor] | Compressor | CompressionWithMemory = Compression.none
    groups: Sequence[Sequence[int]] = ()
    sparse_as_dense: bool = False
    memory: Memory = field(default_factory=dict)
    sparse: set[int] = field(default_factory=set)
    bucket_bytes: int = BUCKET_BYTES
    tuner: BucketTuner | None = None


class GradientReducer:
    """Hooks on parameters that combine their gradients over the ranks, in place.

    Args:
        parameters: parameters by position; the same shapes on every rank, in the same order.
        names: name of each parameter by position, for messages.
        exchange: settings of the reduction.
        passes_per_step: number of backward passes to accumulate before a gradient is sent.
        name: name of the reducer; the same on every rank, and unique among reducers.
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
        self.covers = frozenset(position for position, parameter in parameters.items() if parameter.requires_grad)
        """Positions of the parameters that have a bucket: those that are trainable now."""
        self._plan()
        self._hooks = [self._hook(position) for position in self.covers]

    @property
    def bucket_bytes(self) -> int:
        """Maximum size of the buckets of this step."""
        tuner = self._exchange.tuner
        chosen = self._exchange.bucket_bytes if tuner is None or tuner.bucket_bytes is None else tuner.bucket_bytes
        # A user who limits or disables fusion expects the same limit for gradients.
        return min(chosen, _fusion_bytes())

    def tune(self) -> None:
        """Let the tuner, if there is one, choose the size of buckets; call it after each `finish`, on all ranks."""
        tuner = self._exchange.tuner
        dense = {position: self._parameters[position] for position in self._dense_positions()}
        if tuner is not None and tuner.end_step(dense, max_bytes=_fusion_bytes()):
            self._plan()

    def is_reducing(self) -> bool:
        """Return whether a bucket has been sent since the last `finish`."""
        return any(bucket.is_launched for bucket in self._buckets)

    @property
    def has_open_passes(self) -> bool:
        """Whether `grad` has backward passes that no `finish` has combined yet."""
        return any(self._num_passes.values())

    def finish(self) -> None:
        """Send the remaining buckets, wait for all, and store the combined gradients in `grad`.

        Raises:
            HorovodInternalError: ranks disagree on a bucket, or a rank is lost. The gradients are then undefined.
        """
        try:
            self._follow_round()
            self._launch_remaining()
            # Some compressions need a second message. Send all of them before waiting, so that they travel together.
            for bucket in self._buckets:
                bucket.send_second()
            for bucket in self._buckets:
                bucket.collect()
            self._make_sparse_again()
        finally:
            # Reset also after an error, so that nothing of this step enters the next one.
            self.reset()

    def reset(self) -> None:
        """Wait for the buckets that were sent, discard all results and added gradients, and count passes from 0."""
        for bucket in self._buckets:
            bucket.drop()
        self._num_passes = dict.fromkeys(self._parameters, 0)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def count_pass(self, position: int) -> None:
        """Count a backward pass of this parameter. After the last pass, add its gradient to the bucket.

        Raises:
            AssertionError: there were more passes than `passes_per_step`.
        """
        if self._num_passes[position] >= self.passes_per_step:
            raise AssertionError(
                f"the gradient of '{self._names[position]}' was computed more than backward_passes_per_step "
                f"({self.passes_per_step}) times before optimizer.step(); "
                "increase backward_passes_per_step to accumulate gradients locally"
            )
        self._num_passes[position] += 1
        if self._num_passes[position] == self.passes_per_step:
            self._follow_round()
            if self._exchange.tuner is not None:
                self._exchange.tuner.record(position, self._parameters[position])
            self._handle_sparse(position)
            self._bucket_of[position].add(position)

    def _plan(self) -> None:
        """Plan the buckets; no gradient may have been added to the previous ones in this step."""
        dense = self._dense_positions()
        self._buckets = self._make_buckets({position: self._parameters[position] for position in dense})
        self._bucket_of = {position: bucket for bucket in self._buckets for position in bucket.parameters}
        for position in self.covers - self._bucket_of.keys():
            self._add_sparse_bucket(position)

    def _dense_positions(self) -> list[int]:
        """Return the positions of trainable parameters that need no bucket of their own for sparse gradients."""
        separate = frozenset() if self._exchange.sparse_as_dense else self._exchange.sparse
        return [position for position in self._parameters if position in self.covers and position not in separate]

    def _follow_round(self) -> None:
        """Discard the tuner's choice if it is of an earlier round of the job, before anything is sent in this one."""
        tuner = self._exchange.tuner
        if tuner is not None and tuner.is_outdated:
            tuner.restart()
            self._plan()

    def _hook(self, position: int) -> RemovableHandle:
        # A weak reference, because the parameters refer to the hook. After the user deletes this optimizer and wraps
        # the parameters in a new one, the old hooks do nothing.
        reducer = weakref.ref(self)

        def gradient_accumulated(_: Tensor) -> None:
            live_reducer = reducer()
            if live_reducer is not None:
                live_reducer.count_pass(position)

        register = self._parameters[position].register_post_accumulate_grad_hook
        hook: RemovableHandle = register(gradient_accumulated)  # type: ignore[no-untyped-call]  # untyped in torch
        return hook

    def _launch_remaining(self) -> None:
        """Send the buckets for which this rank has not had all gradients."""
        # Iterate over a copy, because `_handle_sparse` can move a parameter to another bucket.
        for position, bucket in list(self._bucket_of.items()):
            if not bucket.is_launched:
                self._handle_sparse(position)
        for bucket in self._buckets:
            if not bucket.is_launched:
                bucket.launch()

    def _handle_sparse(self, position: int) -> None:
        """If the gradient is sparse, convert it to a dense one, or move its parameter to a bucket of its own."""
        parameter = self._parameters[position]
        if parameter.grad is None or parameter.grad.layout is torch.strided:
            return
        if self._exchange.sparse_as_dense:
            parameter.grad = parameter.grad.to_dense()
            self._exchange.sparse.add(position)
        # A position in `sparse` has its own bucket already.
        elif position not in self._exchange.sparse:
            self._move_to_sparse_bucket(position)

    def _make_sparse_again(self) -> None:
        """Convert dense gradients back to sparse ones, because SparseAdam requires these."""
        if not self._exchange.sparse_as_dense:
            return
        for position in self._exchange.sparse & self._bucket_of.keys():
            parameter = self._parameters[position]
            # Use one sparse dimension, even if the local gradient had more: all ranks must store the same elements.
            if parameter.requires_grad and parameter.grad is not None:
                parameter.grad = parameter.grad.to_sparse(1)

    def _move_to_sparse_bucket(self, position: int) -> None:
        bucket = self._bucket_of[position]
        bucket.exclude(position)
        self._exchange.sparse.add(position)
        self._add_sparse_bucket(position)
        if not bucket.parameters:
            self._buckets.remove(bucket)
        else:
            # This parameter may have been the last one that the bucket waited for.
            bucket.launch_if_complete()

    def _add_sparse_bucket(self, position: int) -> None:
        name = f"{self._name}.sparse.{position}"
        bucket = SparseGradient(name, {position: self._parameters[position]}, self._exchange.reduction)
        self._bucket_of[position] = bucket
        self._buckets.append(bucket)

    def _make_buckets(self, parameters: Mapping[int, Tensor]) -> list[Bucket]:
        """Return the planned buckets of parameters with dense gradients."""
        # The plan has indices into `parameters`; positions have gaps where parameters are frozen or sparse.
        positions = list(parameters)
        indices = {position: index for index, position in enumerate(positions)}
        plan = plan_groups(
            [parameter.numel() * parameter.element_size() for parameter in parameters.values()],
            [(parameter.dtype, parameter.device) for parameter in parameters.values()],
            [[indices[position] for position in group if position in indices] for group in self._exchange.groups],
            bucket_bytes=self.bucket_bytes,
        )
        return [
            self._make_bucket(number, {positions[index]: parameters[positions[index]] for index in members})
            for number, members in enumerate(plan)
        ]

    def _make_bucket(self, number: int, parameters: Mapping[int, Tensor]) -> Bucket:
        name, exchange = f"{self._name}.bucket.{number}", self._exchange
        compression = exchange.compression
        if isinstance(compression, CompressionWithMemory):
            return compression.make_bucket(name, parameters, exchange.reduction, exchange.memory)
        # A compressor of a program may be an object with settings, which need not be hashable.
        if isinstance(compression, type) and compression in FLAT_DTYPES:
            return DenseBucket(name, parameters, exchange.reduction, dtype=FLAT_DTYPES[compression])
        return CompressedBucket(name, parameters, exchange.reduction, compression)


def _fusion_bytes() -> int:
    return runtime.current_job().engine.settings.fusion_bytes
