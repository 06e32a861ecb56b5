"""Measures the costs of a step by running steps. All ranks must call the methods of `Bench` in the same order.

While steps are timed, the ranks communicate only as in training. They exchange their measurements afterwards. Most
costs are means over the ranks. A step takes equally long on all ranks, because each rank waits for the slowest one.
"""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

import datasvc.trainer as hvd
from datasvc.loaders.profiling.step_times import Stage, TimeSpan, Totals
from datasvc.planning.step import StepCosts, StepMode
from datasvc.trainer.recipes.profiling.measure.layer_times import synchronize
from datasvc.trainer.recipes.profiling.measure.messages import StepTraffic, plan_messages
from datasvc.trainer.recipes.profiling.measure.profile import MeasuredRound
from datasvc.trainer.recipes.profiling.measure.profiled_run import (
    BESIDE,
    OWN,
    PARTS,
    WALL,
    ProfiledRun,
    StepPartTimer,
)
from datasvc.trainer.recipes.update import update

# The rows of a table of `StepPartTimer`.
_IO, _TRANSFER, _TARGETS, _FORWARD, _BACKWARD, _REDUCE, _UPDATE = range(len(PARTS))
_FETCHING: Final = (Stage.ORIGIN, Stage.PEER)
_CLOCK_S: Final = 1e-9  # resolution of the clocks of processor time; prevents a division by 0


_SPIN_S: Final = 0.1
_BLOCK: Final = bytes(64 << 10)  # so large that hashing it releases Python's lock, and other threads can run
_MIN_SHARE: Final = 1e-3  # prevents divisions by 0


class Bench:
    """Runs blocks of steps of a run, and times them.

    Attributes:
        spans: parts of the last step that `measure_round` ran.
    """

    def __init__(self, run: ProfiledRun) -> None:
        self._run = run
        # The timed block must not begin with batches that were prefetched earlier, so the warm-up consumes these.
        self._warm_up_steps = run.config.prefetch + 1
        self.spans: list[TimeSpan] = []

    def measure_round(self, traffic: StepTraffic, num_steps: int) -> MeasuredRound:
        """Return the costs of the parts of a step: means over the ranks and over serial steps.

        Args:
            traffic: messages of a step; the measured time of the all-reduces is divided over them.
            num_steps: number of serial steps, and of batches that are taken from the prefetching loader alone.
        """
        run = self._run
        ahead_s, caller_s = self._run_loader(num_steps)
        measured = (self._run_serial(num_steps), ahead_s, caller_s)
        tables, ranks_ahead_s, ranks_caller_s = zip(
            *hvd.allgather_object(measured, name="profile.costs"), strict=True
        )
        table = np.stack(tables)  # [rank, step, part, kind of time]
        means = table.mean(axis=(0, 1))  # [part, kind of time]
        io_s, ahead_s = float(means[_IO, WALL]), float(np.mean(ranks_ahead_s))
        launch_s, reduce_s, skew_s = _split_reduce(table, on_cpu=run.device.type == "cpu")
        targets_s, targets_skew_s = _split_wait(table[..., _TARGETS, WALL])
        forward_s, backward_s = float(means[_FORWARD, WALL]), float(means[_BACKWARD, WALL])
        costs = StepCosts(
            io_s=io_s,
            # Limited to io_s, because noise can make a prefetched batch seem slower; `ahead_over_io` is not limited.
            ahead_s=min(io_s, ahead_s),
            caller_s=min(io_s, float(np.mean(ranks_caller_s))),
            transfer_s=float(means[_TRANSFER, WALL]),
            forward_s=forward_s,
            backward_s=backward_s,
            launch_s=launch_s,
            messages=plan_messages(
                traffic.buckets,
                forward_s=forward_s,
                backward_s=backward_s,
                num_passes=run.batches.num_passes,
                reduce_s=reduce_s,
            ),
            skew_s=skew_s + targets_skew_s,
            update_s=float(means[_UPDATE, WALL]),
            io_beside_s=float(means[_IO, BESIDE]),
            # A single rank sends nothing, so the processor time in this part is not that of all-reduces.
            reduce_beside_s=float(means[_REDUCE, BESIDE]) if hvd.size() > 1 else 0.0,
            contention=self._contention(means),
            targets_s=targets_s,
            samples=run.batches.batch_size,
        )
        return MeasuredRound(costs, ahead_over_io=ahead_s / io_s)

    def run(self, mode: StepMode, num_steps: int) -> float:
        """Return the seconds per step in a mode: the mean over the ranks.

        Only the whole block of steps is timed, because timing a part waits for the device.
        """
        run = self._run
        run.loaders.turn_to(ahead=mode is not StepMode.SERIAL)
        run.reduce_during_backward(overlapped=mode is StepMode.OVERLAPPED)
        self._warm_up()
        began = time.perf_counter()
        for number in range(1, num_steps + 1):
            run.shares_loss = number % run.config.report_every == 0
            loss = update(run, next(run.loaders))
            if run.shares_loss:
                float(loss)  # waits for the device, as each report of the training does
        synchronize(run.device)
        step_s = (time.perf_counter() - began) / num_steps
        return float(np.mean(hvd.allgather_object(step_s, name="profile.run")))

    def _run_loader(self, num_steps: int) -> tuple[float, float]:
        """Return the seconds per batch of the prefetching loader alone, and the part spent in the training thread."""
        loaders = self._run.loaders
        loaders.turn_to(ahead=True)
        for _ in range(self._warm_up_steps):
            next(loaders)
        hvd.barrier()  # ranks of a node share its processors and disk, so all begin at the same time
        loaders.current.restart_report()
        began = time.perf_counter()
        for _ in range(num_steps):
            next(loaders)
        ahead_s = (time.perf_counter() - began) / num_steps
        return ahead_s, _caller_s(loaders.current.report().totals) / num_steps

    def _run_serial(self, num_steps: int) -> npt.NDArray[np.float64]:
        """Return the table of `StepPartTimer` for each serial step: `float64[step, part, kind of time]`."""
        run = self._run
        run.loaders.turn_to(ahead=False)
        run.reduce_during_backward(overlapped=False)
        self._warm_up()
        tables = []
        for _ in range(num_steps):
            timer = StepPartTimer(run.device)
            batch = next(run.loaders)
            timer.mark("io")
            update(run, batch, timer.mark)
            tables.append(timer.table)
            self.spans = timer.spans
        return np.stack(tables)

    def _warm_up(self) -> None:
        """Run untimed steps, then wait for the device and for all ranks, so that the timed steps begin together."""
        for _ in range(self._warm_up_steps):
            update(self._run, next(self._run.loaders))
        synchronize(self._run.device)
        hvd.barrier()

    def _contention(self, means: npt.NDArray[np.float64]) -> float:
        """Return the contention k of the threads that compute on the CPU, or of the thread that launches GPU work.

        `means` is `[part, kind of time]`.
        """
        if self._run.device.type == "cpu":
            return measure_contention(torch.get_num_threads(), self._run.num_threads)
        return _host_share(means) * measure_contention(1, self._run.num_threads)


def _caller_s(totals: Totals) -> float:
    """Return the seconds of the loader's work in the calling thread, without fetching and without waiting.

    `blocked_s` is the time that the calling thread spends in a stage. During `waiting_s` of it, the thread waits for
    other threads.
    """
    return sum(
        max(0.0, blocked_s - totals.waiting_s.get(stage, 0.0))
        for stage, blocked_s in totals.blocked_s.items()
        if stage not in _FETCHING
    )


def _host_share(means: npt.NDArray[np.float64]) -> float:
    """Return the share of a step in which the host of a GPU is busy; contention costs time only while it is busy.

    `means` is `[part, kind of time]`.
    """
    working = means[[_TRANSFER, _FORWARD, _BACKWARD, _UPDATE]].sum(axis=0)
    return float(min(1.0, working[OWN] / working[WALL]))


def _split_reduce(table: npt.NDArray[np.float64], *, on_cpu: bool) -> tuple[float, float, float]:
    """Return the mean seconds of a step's all-reduces as three parts: launch, transfer, wait for the slowest rank.

    `table` is `[rank, step, part, kind of time]`. `on_cpu` states whether the training thread computes the passes.
    """
    least_s, skew_s = _split_wait(table[..., _REDUCE, WALL])
    if len(table) == 1:
        return least_s, 0.0, 0.0  # a single rank transfers nothing, and has no other rank to wait for
    # The launch is measured in processor time. On a CPU, other threads slow the training thread down. The forward and
    # backward passes show by which factor, because the training thread is busy during all of their time.
    passes = table[..., _FORWARD : _BACKWARD + 1, :].sum(axis=(0, 1, 2))
    slowness = max(1.0, passes[WALL] / max(passes[OWN], _CLOCK_S)) if on_cpu else 1.0
    launch_s = min(least_s, float(table[..., _REDUCE, OWN].mean()) * slowness)
    return launch_s, least_s - launch_s, skew_s


def _split_wait(waited: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Divide the mean seconds in a collective operation into the operation itself and the wait for the slowest rank.

    `waited` is `[rank, step]`. The operation starts when the last rank arrives. That rank does not wait, so the
    shortest time of a step is the duration of the operation itself.
    """
    least_s = float(waited.min(axis=0).mean())
    return least_s, max(0.0, float(waited.mean()) - least_s)


# The share of a processor that each thread gets is measured with busy threads. The number of processors does not
# determine this share, because ranks share a node, containers have quotas, and other programs run.


def measure_contention(num_training: int, num_beside: int) -> float:
    """Return the seconds that training loses per second of processor time of the loader; equal on all ranks.

    All ranks first keep `num_training` threads busy, then `num_beside` more. Every rank must call this.

    Args:
        num_training: number of threads of the forward and backward passes: torch's pool on a CPU; 1 on a GPU, the
            thread that launches the work.
        num_beside: number of threads of the loader.
    """
    alone = _mean_share(num_training)
    beside = _mean_share(num_training + num_beside)
    return contention_of(alone, beside, num_beside)


def contention_of(alone: float, beside: float, num_beside: int) -> float:
    """Return the seconds that a pool of threads loses per second of processor time of other threads.

    Let p be the share of a processor that each thread of the pool gets while it runs alone, and q the share that each
    thread gets beside m other threads. The m threads do w seconds of work in w / (m q) seconds. Alone, the pool would
    need only q / p of that time for the same work. It therefore loses w (1 - q / p) / (m q) seconds: 0 with idle
    processors, up to w / (processors of the pool) if all are busy.

    Args:
        alone: p.
        beside: q.
        num_beside: m.

    Returns:
        The lost seconds for w = 1.
    """
    # Limit both shares: a share of 0, or a share that grows with the load, is noise of a short measurement.
    alone = max(_MIN_SHARE, alone)
    beside = min(alone, max(_MIN_SHARE, beside))
    return (1 - beside / alone) / (num_beside * beside)


def _mean_share(num_threads: int) -> float:
    """Return the mean share of a processor that a thread gets while `num_threads` threads of every rank are busy."""
    hvd.barrier()  # all ranks measure at the same time, because ranks of a node share its processors
    with ThreadPoolExecutor(num_threads) as pool:
        shares = list(pool.map(_spin, [_SPIN_S] * num_threads))
    return float(np.mean(hvd.allgather_object(sum(shares) / num_threads, name="profile.share")))


def _spin(duration_s: float) -> float:
    """Keep the calling thread busy for `duration_s`; return its processor time per second."""
    began_s, used_s = time.perf_counter(), time.thread_time()
    while (passed_s := time.perf_counter() - began_s) < duration_s:
        hashlib.blake2b(_BLOCK).digest()
    return (time.thread_time() - used_s) / passed_s
