"""Steps per second of two ranks training with `trainer.DistributedOptimizer`, beside DistributedDataParallel.

Two workloads, one thread a rank, gloo over the loopback: the recipe's small CNN on 64x64 images, where a step is
short and latency counts; and 161 tensors of ResNet-50's sizes (25.6 million fp32, 102 MB) with a loss that only sums
them, so that a step is little but communication. Four ways to train each, in turn, block of steps by block, in the
same pair of processes:

- `ours`: DistributedOptimizer;
- `DDP`: as it comes;
- `DDP, views`: with `gradient_as_bucket_view=True`, which saves a copy of the gradients, as ours always does;
- `alone`: each rank for itself. What the others take beyond it is overhead.

A block begins when all ranks are there and lasts until the slower one ends it. Our engine stays up, idle, while the
others run. Ratios are DDP's time / ours: above 1, ours is the faster.

    python tools/bench/trainer.py [--repeats 11] [--steps-small 60] [--steps-large 4] [--json]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from report import ROOT, Report, make_parser
from rich.console import Console
from rich.progress import Progress

RANKS = 2
OURS, ALONE = "ours", "alone"
DDP = ("DDP", "DDP, views")

# By workload and way to train, milliseconds per step of each block.
StepTimes = dict[str, dict[str, list[float]]]


def measure(repeats: int, steps_small: int, steps_large: int) -> StepTimes:
    """Run the ranks and gather what they say."""
    # The ranks must not find this folder's trainer.py where they import the package: -P.
    command = [sys.executable, "-P", "-m", "trainer.launch", "-np", str(RANKS), "--no-prefix"]
    program = [sys.executable, "-P", str(Path(__file__).with_name("trainer_rank.py"))]
    counts = ["--repeats", repeats, "--steps-small", steps_small, "--steps-large", steps_large]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *program, *map(str, counts)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    times: StepTimes = defaultdict(lambda: defaultdict(list))
    for block in _shown(process.stdout):
        times[block["workload"]][block["way"]].append(block["ms"])
    if process.wait():
        sys.exit(f"the ranks ended with status {process.returncode}")
    return times


def _shown(lines: Iterator[str]) -> Iterator[dict]:
    """Pass blocks on, showing a bar on standard error where that is a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        for line in lines:
            if line.startswith("{"):
                block = json.loads(line)
                progress.update(task, description=block["workload"], completed=block["number"], total=block["of"])
                yield block


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=11)
    parser.add_argument("--steps-small", type=int, default=60, help="steps of a block; default: %(default)s")
    parser.add_argument("--steps-large", type=int, default=4, help="likewise, of ResNet-50's sizes")
    arguments = parser.parse_args()
    times = measure(arguments.repeats, arguments.steps_small, arguments.steps_large)
    report = Report(f"{RANKS} ranks, one thread each, gloo over the loopback")
    for workload, ways in times.items():
        for way, values in ways.items():
            report.add_row(f"{workload}: {way}", "steps/s", [1e3 / ms for ms in values])
        for way in (OURS, *DDP):
            overhead = [ms - alone for ms, alone in zip(ways[way], ways[ALONE], strict=True)]
            report.add_row(f"{workload}: {way}, overhead", "ms/step", overhead)
        for way in DDP:
            report.add_ratio(f"{workload}: time of {way} / {OURS}", ways[way], ways[OURS])
        report.add_ratio(f"{workload}: time of {ALONE} / {OURS}", ways[ALONE], ways[OURS])
    report.show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()
