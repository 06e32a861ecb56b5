"""Cost of a batch's order in a mixture whose weights change, beside one of constant weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import numpy as np

from datasvc.mix_order import MixOrder
from datasvc.mix_schedule import MixStage
from tools.bench.runner import Options, Report, bench, run_rounds, timed

BASELINE = "constant weights"


def read_batches(order: MixOrder, batch: int, num_batches: int) -> float:
    """Return the seconds per batch of what a loader asks for each batch: its samples, and the cursors after it."""

    def read() -> None:
        for number in range(num_batches):
            start = number * batch
            order.locate(0, np.arange(start, start + batch))
            order.cursors(0, start + batch)

    return timed(read) / num_batches


@bench(repeats=7, batch=256, batches=2000, sets=4, stages=20)
def mixture(options: Options) -> Report:
    """Seconds per batch of the order of a mixture on one core, with weights that change, beside constant weights.

    Four data sets, blocks of 4,096, batches of 256. The stages are spread evenly over the batches; of steps, every
    third has a data set that pauses. In each round the arms take turns. Ratios are of durations.
    """
    every_core = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(every_core)})
    rng = np.random.default_rng(0)
    length = max(1, options.batch * options.batches // 4096 // (options.stages + 1))

    def make(*, ramp: bool, num_stages: int) -> Callable[[], float]:
        stages = []
        for number in range(num_stages):
            weights = rng.integers(1, 50, options.sets).tolist()
            if not ramp and number % 3 == 2:
                weights[0] = 0
            stages.append(MixStage((number + 1) * length, tuple(weights), ramp))
        order = MixOrder(
            [100_000] * options.sets, [7, 3, 2, 1] * (options.sets // 4), epoch_samples=1 << 40, block=4096, seed=0,
            stages=stages,
        )  # fmt: skip
        return partial(read_batches, order, options.batch, options.batches)

    arms = {
        BASELINE: make(ramp=False, num_stages=0),
        "steps": make(ramp=False, num_stages=options.stages),
        "ramps": make(ramp=True, num_stages=options.stages),
    }
    seconds = run_rounds(arms, options.repeats, warm_up=True)
    os.sched_setaffinity(0, every_core)
    report = Report(
        f"The order of a mixture of {options.sets} data sets with {options.stages} stages, on one core",
        f"{options.batches:,} batches of {options.batch}, blocks of 4,096.",
    )
    for name, values in seconds.items():
        report.add_row(name, "us a batch", [1e6 * value for value in values])
        if name != BASELINE:
            report.add_ratio(f"{name} / {BASELINE}", values, seconds[BASELINE])
    return report
