"""Positions per second of the access order, beside numpy's permutation."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import numpy as np

from datasvc.keyed_random import Integers
from datasvc.order import AccessOrder, OrderConfig
from tools.bench.runner import Options, Report, bench, run_rounds, timed

BASELINE = "numpy permutation"


def plan_arms(counts: Integers, batch: int) -> tuple[dict[str, Callable[[], float]], list[str]]:
    """Return what to time, in seconds per sample but for the orders' making; and the names of the latter."""
    num_samples = int(counts.sum())
    block = min(8192, num_samples)
    configs = {
        "global": OrderConfig(),
        "windowed": OrderConfig(shuffle="windowed", lanes=8, block=block),
        "sticky": OrderConfig(shuffle="windowed", lanes=8, block=block, sticky=True),
        "none": OrderConfig(shuffle=None),
    }
    rng = np.random.default_rng(0)
    arms = {BASELINE: lambda: timed(lambda: rng.permutation(num_samples)) / num_samples}
    making = []
    for name, config in configs.items():
        order = AccessOrder(counts, config, epoch=0)
        positions = np.arange(num_samples)
        shards, rows = order.locate(positions)
        order.positions_of(shards[:1], rows[:1])  # builds its search, once per epoch

        def make(config: OrderConfig = config) -> float:
            return timed(lambda: AccessOrder(counts, config, epoch=1))

        def per_sample(work: Callable[..., object], size: int, *columns: Integers) -> float:
            def run() -> None:
                for start in range(0, num_samples, size):
                    work(*(each[start : start + size] for each in columns))

            return timed(run) / num_samples

        arms |= {
            f"{name}: locate, epoch": partial(per_sample, order.locate, num_samples, positions),
            f"{name}: locate, batches": partial(per_sample, order.locate, batch, positions),
            f"{name}: positions_of, epoch": partial(per_sample, order.positions_of, num_samples, shards, rows),
            f"{name}: positions_of, batches": partial(per_sample, order.positions_of, batch, shards, rows),
            f"{name}: make the order": make,
        }
        making.append(f"{name}: make the order")
    return arms, making


def make_counts(num_samples: int, num_shards: int) -> Integers:
    """Return samples of each shard, unequal as ingest makes them: `int64[num_shards]`."""
    counts = np.full(num_shards, num_samples // num_shards)
    counts[: num_samples % num_shards] += 1
    pairs = num_shards // 2
    shift = np.random.default_rng(0).integers(0, num_samples // num_shards // 20 + 1, pairs)
    counts[:pairs] += shift
    counts[pairs : 2 * pairs] -= shift
    return counts


@bench(repeats=7, samples=1281167, shards=2000, batch=1024)
def order(options: Options) -> Report:
    """Positions per second of the access order, on one core: `AccessOrder.locate` and its inverse `positions_of`.

    For 1.28 million samples in 2,000 shards (ImageNet's number, at 64 MiB a shard), each kind of shuffle; a whole
    epoch in one call, and batch by batch of 1,024. Making the order of an epoch is timed by itself. Beside it, in the
    same run: numpy's `default_rng.permutation`, which only orders a whole epoch, keeps it in memory, and names no
    shard. Ratios are of speeds: above 1, the access order is the faster.
    """
    every_core = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(every_core)})
    arms, making = plan_arms(make_counts(options.samples, options.shards), options.batch)
    seconds = run_rounds(arms, options.repeats, warm_up=True)  # the first call of each pays for fresh memory
    os.sched_setaffinity(0, every_core)
    report = Report(
        f"The access order of {options.samples:,} samples in {options.shards:,} shards, on one core",
        f"Batches are of {options.batch}; windowed and sticky: 8 lanes, blocks of 8,192.",
    )
    for name, values in seconds.items():
        if name in making:
            report.add_row(name, "ms", [1e3 * value for value in values])
            continue
        report.add_row(name, "positions/s", [1 / value for value in values])
        if "locate" in name:
            report.add_ratio(f"{name} / {BASELINE}", seconds[BASELINE], values)
    return report
