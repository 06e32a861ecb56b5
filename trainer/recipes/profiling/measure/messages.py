"""Measures the messages of a step: their sizes, when they are ready, and their all-reduce times.

A message is what one all-reduce sends: the gradients of one bucket. Every rank must call `measure_traffic`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

import datasvc.trainer as hvd
from datasvc.planning.step import Message
from datasvc.trainer.gradients.bucket_choice import BUCKET_BYTES, plan_buckets
from datasvc.trainer.job import runtime
from datasvc.trainer.recipes.profiling.measure.layer_times import LayerTimer, LayerTimes, choose_clock, synchronize
from datasvc.trainer.recipes.profiling.measure.layers import time_pass
from datasvc.trainer.recipes.profiling.measure.profiled_run import ProfiledRun

_REPEATS: Final = 7
_WARM_UP_PASSES: Final = 2


@dataclass(frozen=True)
class TimedBucket:
    """Gradients that are all-reduced in one message.

    Attributes:
        size_bytes: size of the gradients.
        ready_share: part of the backward pass after which all of these gradients are ready, 0..1.
        alone_s: time of an all-reduce of that size through the engine, over the ranks of this job; 0 for one rank.
    """

    size_bytes: int
    ready_share: float
    alone_s: float


@dataclass(frozen=True)
class StepTraffic:
    """The messages of a step.

    Attributes:
        buckets: buckets of gradients, each sent as one message, in the order in which they are ready on rank 0.
        message_s: fixed cost of a message: the time to all-reduce a single number.
    """

    buckets: tuple[TimedBucket, ...]
    message_s: float


def measure_traffic(run: ProfiledRun, batch: Any, num_passes: int) -> StepTraffic:
    """Return the messages of a step and when they are ready: means over `num_passes` passes with one batch.

    If training compiles the model, it must be compiled before this call.
    """
    timer = LayerTimer(run.model, choose_clock(run.device), sees_layers=False)
    passes = [time_pass(run, batch, timer) for _ in range(_WARM_UP_PASSES + num_passes)]
    # In the order of the optimizer's groups, in which the distributed optimizer plans its buckets too.
    trained = [p for group in run.optimizer.param_groups for p in group["params"] if p.requires_grad]
    return StepTraffic(
        buckets=tuple(
            _measure_buckets(trained, _ready_shares(passes[_WARM_UP_PASSES:]), bucket_bytes=_bucket_bytes(run))
        ),
        message_s=_measure_all_reduce(1, trained[0]),
    )


def _bucket_bytes(run: ProfiledRun) -> int:
    # A single rank and Adasum have no buckets; they are measured as if they had those of the default.
    default = min(BUCKET_BYTES, runtime.current_job().engine.settings.fusion_bytes)
    in_use = getattr(run.optimizer, "bucket_bytes", None)
    return default if in_use is None else in_use


def _ready_shares(passes: Sequence[LayerTimes]) -> dict[Tensor, float]:
    """Return when each parameter's gradient was ready, as a share of the backward pass."""
    return {
        parameter: min(1.0, float(np.mean([times.ready_s[parameter] / times.backward_s for times in passes])))
        for parameter in passes[-1].ready_s
    }


def _measure_buckets(
    parameters: Sequence[Tensor], ready_share: Mapping[Tensor, float], *, bucket_bytes: int
) -> list[TimedBucket]:
    """Return the buckets of a distributed optimizer over `parameters`, in the order in which they are ready here.

    `bucket_bytes` is their maximum size.
    """
    sizes_bytes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    plan = plan_buckets(
        sizes_bytes,
        [(parameter.dtype, parameter.device) for parameter in parameters],
        bucket_bytes=bucket_bytes,
    )
    buckets = [
        TimedBucket(
            size_bytes=sum(sizes_bytes[position] for position in members),
            # A parameter without a gradient delays its bucket to the end of the backward pass.
            ready_share=max(ready_share.get(parameters[position], 1.0) for position in members),
            alone_s=_measure_all_reduce(
                sum(parameters[position].numel() for position in members), parameters[members[0]]
            ),
        )
        for members in plan
    ]
    return sorted(buckets, key=lambda bucket: bucket.ready_share)


def _measure_all_reduce(num_elements: int, like: Tensor) -> float:
    """Return the seconds of an all-reduce from submission to completion, of a tensor with the dtype of `like`."""
    if hvd.size() == 1:
        return 0.0
    tensor = torch.zeros(num_elements, dtype=like.dtype, device=like.device)
    times_s = []
    for _ in range(_REPEATS + 1):
        hvd.barrier()
        synchronize(like.device)
        began = time.perf_counter()
        hvd.grouped_allreduce_([tensor], name="profile.message", op=hvd.Sum)
        synchronize(like.device)
        times_s.append(time.perf_counter() - began)
    # The first repeat is a warm-up. The time of a rank includes its wait for later ranks, but the last rank does not
    # wait: the shortest time of all ranks is that of the transfer.
    shortest_s = [min(rank_times_s) for rank_times_s in zip(*hvd.allgather_object(times_s[1:]), strict=True)]
    return float(statistics.median(shortest_s))


def plan_messages(
    buckets: Sequence[TimedBucket], *, forward_s: float, backward_s: float, num_passes: int, reduce_s: float
) -> tuple[Message, ...]:
    """Return the messages of a step, with a share of the step's all-reduce time each.

    Args:
        buckets: buckets of a `StepTraffic`.
        forward_s: forward time of all passes of a step.
        backward_s: backward time of all passes; gradients are complete in the last pass.
        num_passes: number of passes of a step.
        reduce_s: all-reduce time of all messages together; they share it in proportion to `alone_s`.
    """
    # The time from the start of the step to the start of its last backward pass, if all passes take equally long.
    last_backward_start_s = (forward_s + backward_s) * (num_passes - 1) / num_passes + forward_s / num_passes
    alone_s = sum(bucket.alone_s for bucket in buckets)
    return tuple(
        Message(
            size_bytes=bucket.size_bytes,
            ready_s=last_backward_start_s + bucket.ready_share * backward_s / num_passes,
            # alone_s is 0 for one rank.
            reduce_s=reduce_s * bucket.alone_s / alone_s if alone_s else 0.0,
        )
        for bucket in buckets
    )
