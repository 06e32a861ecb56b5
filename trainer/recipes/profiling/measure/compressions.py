"""Measures how long gradients take with other compressions on the links of this job, and predicts a step with each.

Gradients of random numbers are reduced after, not during, a backward pass, with each compression in turn. Every rank
must call `measure_compressions`.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

import datasvc.trainer as hvd
from datasvc.planning.step import StepCosts, StepMode, step_time
from datasvc.trainer.recipes.build import build_compression
from datasvc.trainer.recipes.profiling.measure.layer_times import synchronize
from datasvc.trainer.recipes.profiling.measure.profiled_run import ProfiledRun

_REPEATS: Final = 5
_SAMPLE_BYTES: Final = 64 << 20  # of gradients; those of a larger model would need several times its memory
_MIN_WIRE_SHARE: Final = 0.05  # of a reduction; a ratio to fewer wire seconds would be one of noise
_PAYS: Final = 0.97  # a compression that saves less than 3 % of a step is not worth what it loses


@dataclass(frozen=True)
class ReduceCost:
    """Seconds of one reduction of all gradients of a model, without overlap.

    Attributes:
        compression: value of `--compression`.
        own_s: processor time of the training thread, mean over the ranks: packing, launching and unpacking.
        wire_s: the rest of the time of the rank that waits least.
        beside_s: processor time of all other threads, mean over the ranks.
    """

    compression: str
    own_s: float
    wire_s: float
    beside_s: float


@dataclass(frozen=True)
class CompressedStep:
    """A predicted step with a compression, gradients being sent during the backward pass.

    Attributes:
        compression: value of `--compression`.
        launch_s: t_l with it.
        reduce_s: t_c with it.
        step_s: duration of a step.
    """

    compression: str
    launch_s: float
    reduce_s: float
    step_s: float


def measure_compressions(run: ProfiledRun, compressions: Sequence[str]) -> tuple[ReduceCost, ...]:
    """Return the cost of the run's own compression, then of `compressions`; nothing for a single rank.

    Args:
        run: the profiled run; its gradients are not changed.
        compressions: values of `--compression`.

    Raises:
        ConfigError: the settings of the run exclude a compression.
        HorovodInternalError: a rank died.
    """
    if hvd.size() == 1 or not compressions:
        return ()
    copies, scale = _copy_sample([p for group in run.optimizer.param_groups for p in group["params"]])
    names = dict.fromkeys((run.config.compression, *compressions))
    optimizers = {name: _wrap(run, name, copies) for name in names}
    found: dict[str, list[ReduceCost]] = {name: [] for name in names}
    for number in range(_REPEATS + 1):
        for name, optimizer in optimizers.items():
            cost = _time_once(optimizer, name, scale)
            if number:  # the first is a warm-up
                found[name].append(cost)
    medians = ("own_s", "wire_s", "beside_s")
    return tuple(
        ReduceCost(name, *(statistics.median(getattr(cost, part) for cost in costs) for part in medians))
        for name, costs in found.items()
    )


def predict_compressed(costs: StepCosts, reduces: Sequence[ReduceCost]) -> list[CompressedStep]:
    """Return the predicted step with each compression; the first is that of the run.

    Messages and the processor time of other threads change by the ratio to the run's compression, the work of the
    training thread by the difference. That work does not overlap with the backward pass, as t_l. If the run's
    compression has almost no wire time, messages change by the difference, shared out in proportion.
    """
    steps = []
    for cost in reduces:
        base = reduces[0]
        longer = _compare_wire(cost, base, costs.reduce_s)
        messages = [dataclasses.replace(each, reduce_s=each.reduce_s * longer) for each in costs.messages]
        changed = dataclasses.replace(
            costs,
            launch_s=max(0.0, costs.launch_s + (cost.own_s - base.own_s)),
            messages=tuple(messages),
            reduce_beside_s=costs.reduce_beside_s * (cost.beside_s / base.beside_s if base.beside_s else 1.0),
        )
        step_s = step_time(changed, StepMode.OVERLAPPED)
        steps.append(CompressedStep(cost.compression, changed.launch_s, changed.reduce_s, step_s))
    return steps


def _compare_wire(cost: ReduceCost, base: ReduceCost, reduce_s: float) -> float:
    """Return by what messages, which take `reduce_s` in total, are to be multiplied."""
    if base.wire_s >= _MIN_WIRE_SHARE * (base.own_s + base.wire_s) and base.wire_s:
        return cost.wire_s / base.wire_s
    return max(0.0, 1.0 + (cost.wire_s - base.wire_s) / reduce_s) if reduce_s else 1.0


def describe_compressed(steps: Sequence[CompressedStep]) -> list[str]:
    """Return a table, and a line that says which compression pays on this link, if one does."""
    base, *others = steps
    lines = [f"{'compression':<22}{'t_l ms':>10}{'t_c ms':>10}{'ms/step':>10}{'speed':>8}"]
    lines += [
        f"{step.compression:<22}{step.launch_s * 1e3:>10.2f}{step.reduce_s * 1e3:>10.2f}{step.step_s * 1e3:>10.2f}"
        f"{base.step_s / step.step_s:>8.2f}"
        for step in steps
    ]
    best = min(others, key=lambda step: step.step_s, default=base)
    if best.step_s >= _PAYS * base.step_s:
        return [*lines, f"none of these pays on this link: at best a step takes {best.step_s / base.step_s:.0%}"]
    times = f"{best.step_s * 1e3:.1f} ms instead of {base.step_s * 1e3:.1f}"
    return [*lines, f"--compression {best.compression} pays on this link: a step takes {times}"]


def _copy_sample(parameters: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """Return parameters of the same shapes with random gradients, and the bytes of all through the bytes of these."""
    copies: list[Tensor] = []
    num_bytes = 0
    for parameter in parameters:
        if parameter.requires_grad and (not copies or num_bytes + parameter.nbytes <= _SAMPLE_BYTES):
            copy = torch.zeros_like(parameter, requires_grad=True)
            copy.grad = torch.randn_like(copy)
            copies.append(copy)
            num_bytes += parameter.nbytes
    return copies, sum(parameter.nbytes for parameter in parameters if parameter.requires_grad) / num_bytes


def _wrap(run: ProfiledRun, compression: str, parameters: Sequence[Tensor]) -> Any:
    config = dataclasses.replace(run.config, compression=compression)
    return hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.0),
        compression=build_compression(config),
        bucket_bytes=config.parse_bucket() if config.bucket != "auto" else None,
        # Not Sum: the gradients of a repeat are those that the one before has left, and must not grow.
        op=hvd.Average,
    )


def _time_once(optimizer: Any, compression: str, scale: float) -> ReduceCost:
    device = optimizer.param_groups[0]["params"][0].device
    hvd.barrier()
    synchronize(device)
    began, own, every = time.perf_counter(), time.thread_time(), time.process_time()
    optimizer.synchronize()  # no backward pass has sent anything, so it sends all gradients
    own_s = time.thread_time() - own
    synchronize(device)
    times = (time.perf_counter() - began, own_s, time.process_time() - every - own_s)
    walls, owns, besides = zip(*hvd.allgather_object(times, name="profile.compression"), strict=True)
    # The rank that comes last does not wait for others.
    mean_own_s, wall_s = statistics.fmean(owns), min(walls)
    parts = (mean_own_s, max(0.0, wall_s - mean_own_s), max(0.0, statistics.fmean(besides)))
    return ReduceCost(compression, *(scale * part for part in parts))
