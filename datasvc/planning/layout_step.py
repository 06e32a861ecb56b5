"""Estimates the duration of a step of a candidate, from the compute times of one rank and the costs of collectives.

The step of the slowest rank of a pipeline, with m micro-batches, and with f and b for its forward and backward pass
of one micro-batch, takes

    T = m (f + b) + bubble + shard + data + update

f and b contain the collectives that no computation can hide. In a tensor group these are, per block and pass, two
all-reduces (Shoeybi et al. 2019, arXiv:1909.08053) and an exchange of queries, keys and values; in a context group,
an all-gather of keys and values; in a pipeline, sends to the next rank. Recomputation adds the forward pass of the
blocks to b (Chen et al. 2016, arXiv:1604.06174). The bubble is that of `idle_s`. `shard` and `data` are the
parts of the collectives of gradients and parameters that do not overlap with computation.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from datasvc.errors import ConfigError
from datasvc.planning.candidates import GPUS, Candidate, ExecutionTraits
from datasvc.planning.cluster import (
    Cluster,
    LinkedRanks,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    place_group,
    reduce_scatter_s,
    send_s,
)
from datasvc.planning.layout import AXES, Layout, stages_per_rank
from datasvc.planning.memory import RankParts, StateBytes, divide_parts, element_bytes, rank_parameters
from datasvc.planning.model_costs import ModelCosts

_BACKWARD_FLOPS: Final = 2  # a backward pass computes gradients of activations and of weights
_BUCKET_BYTES: Final = 25 << 20  # gradients of one all-reduce, as in `bucket_choice`, whose module imports torch


@dataclass(frozen=True)
class ComputeTimes:
    """Seconds of one rank that has the whole model, without communication.

    Attributes:
        forward_s: forward pass of one sample.
        backward_s: backward pass of one sample.
        update_s: update of all parameters.
        divided_block_s: additional time of a forward and a backward pass of a block if `tensor` divides its layers,
            without communication: the dispatch of distributed tensors, which a GPU hides.
    """

    forward_s: float
    backward_s: float
    update_s: float = 0.0
    divided_block_s: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= value < math.inf for value in dataclasses.astuple(self)) or not self.forward_s:
            raise ConfigError(f"{self}; expected finite numbers, not below 0, and a forward pass that takes time")


@dataclass(frozen=True)
class PlannedWork:
    """A training run to plan.

    Attributes:
        costs: costs of the model.
        times: compute times of one rank with the whole model.
        states: bytes per parameter.
        precision: precision of the activations.
        global_batch: samples of all ranks per step.
        memory_bytes: memory of a device; None: not limited.
        traits: how the ranks compute and communicate.
    """

    costs: ModelCosts
    times: ComputeTimes
    states: StateBytes
    precision: str
    global_batch: int
    memory_bytes: float | None = None
    traits: ExecutionTraits = GPUS

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise ConfigError(f"global_batch is {self.global_batch}; expected at least 1")


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of a step of the slowest rank, by part.

    Attributes:
        compute_s: forward and backward passes, including recomputation.
        tensor_s: all-reduces and exchanges of the tensor group.
        context_s: exchange of keys and values in the context group.
        send_s: messages between stages.
        idle_s: bubble of the pipeline.
        shard_s: gathers of parameters and reduce-scatters of gradients that computation does not hide.
        data_s: all-reduces of gradients that computation does not hide.
        update_s: update of the rank's parameters.
    """

    compute_s: float
    tensor_s: float = 0.0
    context_s: float = 0.0
    send_s: float = 0.0
    idle_s: float = 0.0
    shard_s: float = 0.0
    data_s: float = 0.0
    update_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Duration of the step."""
        state_s = self.shard_s + self.data_s + self.update_s
        return self.compute_s + self.tensor_s + self.context_s + self.send_s + self.idle_s + state_s


@dataclass(frozen=True)
class _PassTimes:
    """Seconds of a forward or a backward pass of one micro-batch on one rank."""

    compute_s: float
    tensor_s: float
    context_s: float
    send_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.tensor_s + self.context_s + self.send_s


def rate_compute(
    costs: ModelCosts, flops_per_s: float, *, states: StateBytes, memory_bytes_per_s: float = math.inf
) -> ComputeTimes:
    """Return the compute times of a device with a given rate.

    Args:
        costs: costs of the model.
        flops_per_s: floating-point operations per second that the device reaches in training.
        states: bytes per parameter.
        memory_bytes_per_s: bandwidth of the device's memory, which limits the update; infinite: the update is free.
    """
    forward_s = costs.forward_flops / flops_per_s
    update_s = costs.parameters * _updated_bytes(states) / memory_bytes_per_s
    return ComputeTimes(forward_s, _BACKWARD_FLOPS * forward_s, update_s)


def _updated_bytes(states: StateBytes) -> float:
    """Return the bytes that an update moves for each parameter. All are read; parameter and state are written."""
    return 2 * states.parameter + states.gradient + 2 * states.optimizer


def peers_of_first(layout: Layout, *axes: str) -> list[int]:
    """Return the ranks that differ from rank 0 in the given axes only, in order."""
    strides, stride = {}, 1
    for axis in reversed(AXES):
        strides[axis] = stride
        stride *= layout.size_of(axis)
    spans = [range(0, strides[axis] * layout.size_of(axis), strides[axis]) for axis in axes]
    return sorted(sum(place) for place in itertools.product(*spans))


def estimate_step(work: PlannedWork, candidate: Candidate, cluster: Cluster) -> StepEstimate:
    """Return the seconds of a step, for batches that are always ready and ranks that are equally fast."""
    return _Estimator(work, candidate, cluster).estimate()


@dataclass(frozen=True)
class _Estimator:
    work: PlannedWork
    candidate: Candidate
    cluster: Cluster

    def estimate(self) -> StepEstimate:
        costs, times, traits = self.work.costs, self.work.times, self.work.traits
        layout, num_passes = self.candidate.layout, self.candidate.num_micro_batches
        ranks = divide_parts(costs.layers, layout.pipeline, self.candidate.schedule)
        # Computed once for ranks with equal parts, which most ranks of a long pipeline have.
        times_of = {parts: self._pass_times(parts) for parts in set(ranks)}
        forwards, backwards = [times_of[parts][0] for parts in ranks], [times_of[parts][1] for parts in ranks]
        totals_s = [first.total_s + then.total_s for first, then in zip(forwards, backwards, strict=True)]
        bubble_s = idle_s(
            self.candidate.schedule, [each.total_s for each in forwards], [each.total_s for each in backwards]
        )
        slowest = totals_s.index(max(totals_s))
        forward, backward = forwards[slowest], backwards[slowest]
        if traits.processors_per_rank < 1:
            # The longer of two times: the mean work of all ranks, which share the processors; and the critical path
            # of a rank, which computes faster while others wait.
            path_s = traits.processors_per_rank * (num_passes * totals_s[slowest] + bubble_s)
            forward, backward = _mean_pass(forwards), _mean_pass(backwards)
            bubble_s = max(0.0, path_s - num_passes * (forward.total_s + backward.total_s))
        # The rank with the most parameters communicates longest. It is not always the slowest one.
        largest = max(ranks, key=lambda parts: rank_parameters(costs, parts, layout.tensor))
        count = rank_parameters(costs, largest, layout.tensor)
        shard_s, data_s = self._state_s(count, largest.blocks + 1, forward, backward)
        num_updated = count / (self.candidate.num_shards if self.candidate.zero else 1)
        return StepEstimate(
            compute_s=num_passes * (forward.compute_s + backward.compute_s),
            tensor_s=num_passes * (forward.tensor_s + backward.tensor_s),
            context_s=num_passes * (forward.context_s + backward.context_s),
            send_s=num_passes * (forward.send_s + backward.send_s),
            idle_s=bubble_s,
            shard_s=shard_s,
            data_s=data_s + self._sum_tied_s(),
            update_s=times.update_s * num_updated / costs.parameters,
        )

    def _pass_times(self, parts: RankParts) -> tuple[_PassTimes, _PassTimes]:
        """Return the times of the forward and of the backward pass of a micro-batch on a rank with these parts."""
        costs, times, cluster = self.work.costs, self.work.times, self.cluster
        layout, samples = self.candidate.layout, self.candidate.micro_batch
        blocks_flops = parts.blocks * costs.block.forward_flops / layout.tensor
        # Every rank of a tensor group computes all logits.
        flops = blocks_flops + parts.has_first * costs.first.forward_flops + parts.has_last * costs.last.forward_flops
        # Factor from the FLOPs of a rank to its share of the measured or given times of a sample.
        share = samples / layout.context / costs.forward_flops
        num_recomputed = 1 if self.candidate.recompute else 0
        recompute_s = num_recomputed * times.forward_s * blocks_flops * share

        stream_bytes = samples * costs.boundary_elements * element_bytes(self.work.precision)
        tensor_group, context_group = self._group("tensor"), self._group("context")
        token_bytes = stream_bytes / layout.context
        tensor_s = 2 * parts.blocks * all_reduce_s(token_bytes, tensor_group, cluster)
        # Queries, keys and values of this rank's channels go to the ranks of their heads.
        tensor_s += parts.blocks * all_to_all_s(3 * token_bytes / layout.tensor, tensor_group, cluster)
        tensor_s += parts.blocks * times.divided_block_s / 2 if layout.tensor > 1 else 0.0
        # Keys, then values, of all tokens and of the heads of this rank. Backward, their gradients are summed.
        context_s = 2 * parts.blocks * all_gather_s(stream_bytes / layout.tensor, context_group, cluster)
        message_s = send_s(stream_bytes / layout.context, self._group("pipeline"), cluster)
        message_s *= stages_per_rank(self.candidate.schedule)
        forward = _PassTimes(times.forward_s * flops * share, tensor_s, context_s, message_s)
        backward = _PassTimes(
            times.backward_s * flops * share + recompute_s,
            (1 + num_recomputed) * tensor_s,
            (1 + num_recomputed) * context_s,
            message_s,
        )
        return forward, backward

    def _state_s(
        self, count: float, num_units: int, forward: _PassTimes, backward: _PassTimes
    ) -> tuple[float, float]:
        """Return `shard_s` and `data_s` of a `StepEstimate`.

        Args:
            count: number of parameters of the rank, before the axis `shard` divides them.
            num_units: units that are gathered and reduced one after the other: each block, and all other parameters.
            forward: times of a forward pass.
            backward: times of a backward pass.
        """
        candidate, states, traits = self.candidate, self.work.states, self.work.traits
        layout, num_passes = candidate.layout, candidate.num_micro_batches
        # Seconds per byte of memory, taken from the update, which does little but read and write.
        byte_s = self.work.times.update_s / (self.work.costs.parameters * _updated_bytes(states))
        # FSDP reduces the gradients of each pass; a pipeline, and replicas without FSDP, add those of a step first.
        num_reductions = num_passes if layout.pipeline == 1 and candidate.zero >= 2 else 1
        # Computation of a pass that collectives can overlap with.
        forward_s, backward_s = traits.overlap * forward.compute_s, traits.overlap * backward.compute_s
        shard_s, gather_again_s, reduce_s = 0.0, 0.0, 0.0
        group = self._group("shard", "context")
        gather_s = num_units * all_gather_s(count * states.parameter / num_units, group, self.cluster)
        if candidate.zero == 1:
            shard_s = gather_s  # after the update, when nothing else runs
        elif candidate.zero:
            scatter = all_reduce_s if traits.scatters_by_all_reduce else reduce_scatter_s
            reduce_s = num_units * scatter(count * states.gradient / num_units, group, self.cluster)
            # FSDP copies the rank's part into a message and all parts out of it, and gradients into a message.
            gather_s += 2 * (1 + 1 / candidate.num_shards) * count * states.parameter * byte_s
            reduce_s += 2 * count * states.gradient * byte_s * (2 if traits.scatters_by_all_reduce else 1)
            gather_again_s = gather_s if candidate.zero == 3 else 0.0
            # A pipeline keeps gathered parameters until the end of the step, unless the forward pass frees them.
            num_gathers = num_passes if layout.pipeline == 1 or candidate.zero == 3 else 1
            shard_s = num_gathers * _exposed_s(gather_s, forward_s, num_units)
        data_reduce_s = self._all_reduce_gradients_s(count)
        if layout.pipeline > 1 and not candidate.zero:
            return 0.0, data_reduce_s  # after the last backward pass, when nothing else runs
        exposed_s = _exposed_s(gather_again_s + reduce_s, backward_s, num_units)
        # A pipeline gathers parameters again once per step: they stay gathered from a backward to the next forward
        # pass.
        shard_s += num_reductions * exposed_s
        # The same computation hides the collectives of both axes, so `data` has what is exposed in addition.
        all_exposed_s = _exposed_s(gather_again_s + reduce_s + data_reduce_s, backward_s, num_units)
        return shard_s, num_reductions * (all_exposed_s - exposed_s)

    def _all_reduce_gradients_s(self, count: float) -> float:
        """Return the seconds of the all-reduces of gradients over the ranks that hold the same parameters."""
        is_sharded = self.candidate.zero >= 2
        size_bytes = count * self.work.states.gradient / (self.candidate.num_shards if is_sharded else 1)
        num_messages = max(1, math.ceil(size_bytes / _BUCKET_BYTES))
        group = self._group("data") if is_sharded else self._group("data", "shard", "context")
        return num_messages * all_reduce_s(size_bytes / num_messages, group, self.cluster)

    def _sum_tied_s(self) -> float:
        """Return the seconds in which first and last rank of a pipeline add the gradients of shared weights."""
        num_tied, layout = self.work.costs.tied_parameters, self.candidate.layout
        if not num_tied or layout.pipeline == 1 or self.candidate.schedule == "zbv":
            return 0.0
        ranks = peers_of_first(layout, "pipeline")
        group = place_group([ranks[0], ranks[-1]], self.cluster.ranks_per_node)
        return all_reduce_s(num_tied * self.work.states.gradient / self.candidate.num_shards, group, self.cluster)

    def _group(self, *axes: str) -> LinkedRanks:
        return _place(self.candidate.layout, self.cluster.ranks_per_node, axes)


def _mean_pass(passes: Sequence[_PassTimes]) -> _PassTimes:
    sums = (sum(parts) for parts in zip(*map(dataclasses.astuple, passes), strict=True))
    return _PassTimes(*(total / len(passes) for total in sums))


def _exposed_s(collectives_s: float, compute_s: float, num_units: int) -> float:
    """Return the seconds that computation does not hide: at least one of `num_units` units, the first or the last."""
    return max(collectives_s / num_units, collectives_s - compute_s * (num_units - 1) / num_units)


@functools.lru_cache(maxsize=64)
def _place(layout: Layout, ranks_per_node: int, axes: tuple[str, ...]) -> LinkedRanks:
    # All candidates of a layout have the same groups, some with thousands of ranks.
    return place_group(peers_of_first(layout, *axes), ranks_per_node)


def idle_s(schedule: str, forward_s: Sequence[float], backward_s: Sequence[float]) -> float:
    """Return the bubble: the seconds of a step in which the slowest rank has no work.

    Args:
        schedule: one of `PIPELINE_SCHEDULES`.
        forward_s: forward pass of one micro-batch on each rank.
        backward_s: backward pass of one micro-batch on each rank.

    Returns:
        At least 0. With equal ranks: (p - 1) (f + b) for GPipe and 1F1B, 1/v of it for interleaved 1F1B, and
        (p - 1) (f - b / 2) for ZB-V, whose backward pass consists of two equal halves.
    """
    # The first micro-batch passes all ranks; from then on the slowest rank sets the pace.
    totals_s = [forward + backward for forward, backward in zip(forward_s, backward_s, strict=True)]
    if schedule == "zbv":
        half_s = [forward - backward / 2 for forward, backward in zip(forward_s, backward_s, strict=True)]
        return max(0.0, sum(half_s) - max(half_s))
    return (sum(totals_s) - max(totals_s)) / stages_per_rank(schedule)
