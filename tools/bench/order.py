"""Positions per second of the access order, on one core: `AccessOrder.locate` and its inverse `positions_of`.

For 1.28 million samples in 2,000 shards (ImageNet's number, at 64 MiB a shard), each kind of shuffle; a whole epoch
in one call, and batch by batch of 1,024. Making the order of an epoch is timed by itself. Beside it, in the same run:
numpy's `default_rng.permutation`, which only orders a whole epoch, keeps it in memory, and names no shard. Ratios are
of speeds: above 1, the access order is the faster.

    python tools/bench/order.py [--repeats 7] [--samples 1281167] [--shards 2000] [--batch 1024] [--json]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
from report import Report, alternate, make_parser

from datasvc.keyed_random import Integers
from datasvc.order import AccessOrder, OrderConfig

BASELINE = "numpy permutation"


def plan_contestants(counts: Integers, batch: int) -> tuple[dict[str, Callable[[], float]], list[str]]:
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
    contestants = {BASELINE: lambda: _timed(lambda: rng.permutation(num_samples)) / num_samples}
    making = []
    for name, config in configs.items():
        order = AccessOrder(counts, config, epoch=0)
        positions = np.arange(num_samples)
        shards, rows = order.locate(positions)
        order.positions_of(shards[:1], rows[:1])  # builds its search, once per epoch

        def make(config: OrderConfig = config) -> float:
            return _timed(lambda: AccessOrder(counts, config, epoch=1))

        def locate(size: int, order: AccessOrder = order, positions: Integers = positions) -> float:
            def run() -> None:
                for start in range(0, num_samples, size):
                    order.locate(positions[start : start + size])

            return _timed(run) / num_samples

        def invert(size: int, order: AccessOrder = order, shards: Integers = shards, rows: Integers = rows) -> float:
            def run() -> None:
                for start in range(0, num_samples, size):
                    order.positions_of(shards[start : start + size], rows[start : start + size])

            return _timed(run) / num_samples

        contestants |= {
            f"{name}: locate, epoch": lambda locate=locate: locate(num_samples),
            f"{name}: locate, batches": lambda locate=locate: locate(batch),
            f"{name}: positions_of, epoch": lambda invert=invert: invert(num_samples),
            f"{name}: positions_of, batches": lambda invert=invert: invert(batch),
            f"{name}: make the order": make,
        }
        making.append(f"{name}: make the order")
    return contestants, making


def make_counts(num_samples: int, num_shards: int) -> Integers:
    """Return samples of each shard, unequal as ingest makes them: `int64[num_shards]`."""
    counts = np.full(num_shards, num_samples // num_shards)
    counts[: num_samples % num_shards] += 1
    pairs = num_shards // 2
    shift = np.random.default_rng(0).integers(0, num_samples // num_shards // 20 + 1, pairs)
    counts[:pairs] += shift
    counts[pairs : 2 * pairs] -= shift
    return counts


def _timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=7)
    parser.add_argument("--samples", type=int, default=1_281_167)
    parser.add_argument("--shards", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=1024)
    arguments = parser.parse_args()
    report = Report(
        f"The access order of {arguments.samples:,} samples in {arguments.shards:,} shards, on one core",
        f"Batches are of {arguments.batch}; windowed and sticky: 8 lanes, blocks of 8,192.",
    )
    every_core = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(every_core)})
    contestants, making = plan_contestants(make_counts(arguments.samples, arguments.shards), arguments.batch)
    alternate(contestants, 1)  # the first call of each pays for fresh memory
    seconds = alternate(contestants, arguments.repeats)
    os.sched_setaffinity(0, every_core)
    for name, values in seconds.items():
        if name in making:
            report.add_row(name, "ms", [1e3 * value for value in values])
            continue
        report.add_row(name, "positions/s", [1 / value for value in values])
        if "locate" in name:
            report.add_ratio(f"{name} / {BASELINE}", seconds[BASELINE], values)
    report.show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()
