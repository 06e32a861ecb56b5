"""Measures what a step costs, by running steps. Every rank calls these in the same order.

Nothing is exchanged while steps are timed but what training exchanges. What a rank measured is averaged over the
ranks afterwards: their steps take equally long, because each waits for the slowest.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

import trainer as hvd
from loaders.step_times import Span
from trainer.recipes.profiling.contention import measure_contention
from trainer.recipes.profiling.costs import StepCosts
from trainer.recipes.profiling.layer_times import synchronize
from trainer.recipes.profiling.layers import Layers
from trainer.recipes.profiling.messages import plan_messages
from trainer.recipes.profiling.parts import Parts, for_ever
from trainer.recipes.profiling.step_time import Mode
from trainer.recipes.profiling.timed_step import BESIDE, OWN, PARTS, WALL, StepTimer

_IO, _TRANSFER, _FORWARD, _BACKWARD, _REDUCE, _UPDATE = range(len(PARTS))


class Bench:
    """Runs blocks of steps.

    Args:
        parts: of this rank.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._ahead, self._at_call = for_ever(parts.ahead), for_ever(parts.at_call)
        # What was prefetched while nobody asked must be gone before the clock starts.
        self._warm_up_steps = parts.config.prefetch + 1
        self.spans: list[Span] = []

    def first_batch(self) -> Any:
        """Return a batch, which is valid until steps are run."""
        return next(self._at_call)

    def measure_costs(self, layers: Layers, num_steps: int) -> StepCosts:
        """Return what the parts of a step cost: means over a serial run's steps, and over the ranks.

        Args:
            layers: give the share that each message has in the all-reduces.
            num_steps: of that run, and batches of a loader that works ahead.
        """
        parts = self._parts
        ahead_s, caller_s = self._run_loader(num_steps)
        own = (self._run_serial(num_steps), ahead_s, caller_s)
        tables, ahead, caller = zip(*hvd.allgather_object(own, name="profile.costs"), strict=True)
        table = np.stack(tables)  # [rank, step, part, kind of time]
        means = table.mean(axis=(0, 1))
        io_s = float(means[_IO, WALL])
        launch_s, reduce_s, skew_s = _split_reduce(table, on_cpu=parts.device.type == "cpu")
        forward_s, backward_s = means[_FORWARD, WALL], means[_BACKWARD, WALL]
        return StepCosts(
            io_s=io_s,
            # In a noisy moment it may look as if prefetching took longer.
            ahead_s=min(io_s, float(np.mean(ahead))),
            caller_s=min(io_s, float(np.mean(caller))),
            transfer_s=float(means[_TRANSFER, WALL]),
            forward_s=float(forward_s),
            backward_s=float(backward_s),
            launch_s=launch_s,
            messages=plan_messages(
                layers.buckets,
                forward_s=float(forward_s),
                backward_s=float(backward_s),
                num_passes=parts.batches.num_passes,
                reduce_s=reduce_s,
            ),
            skew_s=skew_s,
            update_s=float(means[_UPDATE, WALL]),
            io_beside_s=float(means[_IO, BESIDE]),
            reduce_beside_s=float(means[_REDUCE, BESIDE]) if hvd.size() > 1 else 0.0,
            contention=measure_contention(parts.num_threads),
            samples=parts.batches.batch_size,
        )

    def run(self, mode: Mode, num_steps: int) -> float:
        """Return the seconds per step of a run in one of the modes, nothing timed inside; mean over the ranks."""
        parts = self._parts
        source = self._at_call if mode is Mode.SERIAL else self._ahead
        parts.sends_beside(beside=mode is Mode.OVERLAPPED)
        for _ in range(self._warm_up_steps):
            parts.step(next(source))
        synchronize(parts.device)
        hvd.barrier()
        began = time.perf_counter()
        for _ in range(num_steps):
            parts.step(next(source))
        synchronize(parts.device)
        step_s = (time.perf_counter() - began) / num_steps
        return float(np.mean(hvd.allgather_object(step_s, name="profile.run")))

    def _run_loader(self, num_steps: int) -> tuple[float, float]:
        """Return the seconds per batch of the loader that works ahead, and of those the training thread's own."""
        for _ in range(self._warm_up_steps):
            next(self._ahead)
        loader = self._parts.ahead
        hvd.barrier()
        loader.restart_report()
        began = time.perf_counter()
        for _ in range(num_steps):
            next(self._ahead)
        ahead_s = (time.perf_counter() - began) / num_steps
        totals = loader.report().totals
        return ahead_s, max(0.0, totals.wait_s - sum(totals.waiting_s.values())) / num_steps

    def _run_serial(self, num_steps: int) -> npt.NDArray[np.float64]:
        """Return the table of each step, see `StepTimer`."""
        parts = self._parts
        parts.sends_beside(beside=False)
        for _ in range(self._warm_up_steps):
            parts.step(next(self._at_call))
        hvd.barrier()
        tables = []
        for _ in range(num_steps):
            timer = StepTimer(parts.device)
            batch = next(self._at_call)
            timer.mark("io")
            parts.step(batch, timer.mark)
            tables.append(timer.table)
            self.spans = timer.spans
        return np.stack(tables)


def _split_reduce(table: npt.NDArray[np.float64], *, on_cpu: bool) -> tuple[float, float, float]:
    """Return what of the all-reduces is launching them, what is their own time, and what is waiting for a rank.

    Args:
        table: `[rank, step, part, kind of time]`.
        on_cpu: whether the training thread computes, so that its processor time tells how fast it gets on.
    """
    if len(table) == 1:
        return float(table[..., _REDUCE, WALL].mean()), 0.0, 0.0
    waited = table[..., _REDUCE, WALL]
    least_s = float(waited.min(axis=0).mean())  # who comes last to an all-reduce waits for nobody
    passes = table[..., _FORWARD : _BACKWARD + 1, :].sum(axis=(0, 1, 2))
    slowness = max(1.0, passes[WALL] / passes[OWN]) if on_cpu and passes[OWN] else 1.0
    launch_s = min(least_s, float(table[..., _REDUCE, OWN].mean()) * slowness)
    return launch_s, least_s - launch_s, float(waited.mean()) - least_s
