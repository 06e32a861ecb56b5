"""What DistributedOptimizer costs, beside torch's DistributedDataParallel and beside no communication.

One thread a rank, gloo over the loopback. Two workloads: ResNet-18 on 32 images of 32x32; and 161 tensors of
ResNet-50's sizes (25.6 million fp32, 102 MB) with a loss that only sums them, so that a step is little but
communication. Parts:

- `compare`, two ranks: block of steps by block, in turn, in one pair of processes, by `ours`; by `ours, not fused`
  (HOROVOD_FUSION_THRESHOLD=0: each gradient travels alone); by `DDP`; by `DDP, views`, with
  `gradient_as_bucket_view`; and `alone`, each rank for itself. A block begins when all ranks are there and lasts
  until the slower one ends it. Our engine runs only in our blocks. Ratios are the other's time / ours: above 1, ours
  is the faster. "Processor" is what all threads of the slower rank used: it counts on a machine that is busy with
  other work, where the clock measures the others too, but not what a rank waits for.
- `alone`, one rank: ours against the plain optimizer.
- `negotiation`, two ranks: time of a cycle, from the requests of the ranks to the list of what may run; of the bare
  collective in it; and of a barrier, which is submission, a cycle, and the wake-ups of both threads.
- `wire`, two ranks in a network namespace of their own, if one can be had: bytes through its loopback per step, both
  directions, with all headers and what negotiation sends.

    python tools/bench/trainer.py [PART ...] [--repeats 7] [--seconds 2] [--json]
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

RANKS = {"compare": 2, "alone": 1, "negotiation": 2, "wire": 2}
OURS, UNFUSED, ALONE = "ours", "ours, not fused", "alone"
DDP = ("DDP", "DDP, views")
# Its loopback is down at first.
OWN_NETWORK = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]

PROCESSOR = ", processor"

# By workload and way, a figure of each repeat: milliseconds, or megabytes.
Values = dict[str, dict[str, list[float]]]


def measure(part: str, repeats: int, seconds: float, workload: str | None) -> Values:
    """Run the ranks of one part and gather what they say."""
    # The ranks must not find this folder's trainer.py where they import the package: -P.
    command = [sys.executable, "-P", "-m", "datasvc.trainer.launch", "-np", str(RANKS[part]), "--no-prefix"]
    program = [sys.executable, "-P", str(Path(__file__).with_name("trainer_rank.py")), part]
    options = ["--repeats", str(repeats), "--seconds", str(seconds)]
    options += ["--workload", workload] if workload else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    prefix = OWN_NETWORK if part == "wire" and has_own_network() else []
    process = subprocess.Popen(
        [*prefix, *command, *program, *options], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    values: Values = defaultdict(lambda: defaultdict(list))
    for line in _shown(process.stdout):
        values[line["workload"]][line["way"]].append(line["mb" if "mb" in line else "ms"])
        if "processor_ms" in line:
            values[line["workload"] + PROCESSOR][line["way"]].append(line["processor_ms"])
    if process.wait():
        sys.exit(f"the ranks ended with status {process.returncode}")
    return values


def has_own_network() -> bool:
    """Return whether this system gives a network namespace; without, others' traffic is counted too."""
    try:
        return subprocess.run([*OWN_NETWORK, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


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


def report_comparison(report: Report, values: Values) -> None:
    """Add steps per second, overheads and ratios of two ranks."""
    for workload, ways in values.items():
        for way, times_ms in ways.items():
            _add_times(report, f"{workload}: {way}", times_ms)
        for way in (*DDP, UNFUSED, ALONE):
            report.add_ratio(f"{workload}: time of {way} / {OURS}", ways[way], ways[OURS])


def report_one_rank(report: Report, values: Values) -> None:
    """Add what a wrapped optimizer costs where there is nobody to talk to."""
    for workload, ways in values.items():
        for way, times_ms in ways.items():
            _add_times(report, f"1 rank, {workload}: {way}", times_ms)
        report.add_ratio(f"1 rank, {workload}: time of {OURS} / {ALONE}", ways[OURS], ways[ALONE])


def _add_times(report: Report, name: str, times_ms: list[float]) -> None:
    if PROCESSOR in name:
        report.add_row(name, "ms/step", times_ms)
    else:
        report.add_row(name, "steps/s", [1e3 / ms for ms in times_ms])


def report_negotiation(report: Report, values: Values) -> None:
    """Add the time of a cycle, of the collective in it, and of an operation that is nothing else."""
    ways = values["negotiation"]
    report.add_row("bare exchange of 512 bytes", "ms", ways["bare exchange"])
    report.add_row("negotiation: a cycle of 16 gradients", "ms", ways["a cycle"])
    report.add_row("negotiation of one operation, with wake-ups", "ms", ways["a barrier"])
    report.add_ratio("bare exchange / a cycle", ways["bare exchange"], ways["a cycle"])


def report_wire(report: Report, values: Values) -> None:
    """Add bytes of a step."""
    ways = values["wire"]
    for way, sent_mb in ways.items():
        report.add_row(f"through the loopback, compression {way}", "MB/step", sent_mb)
    report.add_ratio("bytes of bf16 / none", ways["bf16"], ways["none"])


PARTS = {
    "compare": report_comparison,
    "alone": report_one_rank,
    "negotiation": report_negotiation,
    "wire": report_wire,
}


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=7)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a block; default: %(default)s")
    parser.add_argument("--workload", help="of `compare` and `alone`; default: both")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - PARTS.keys()
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}")
    report = Report("one thread a rank, gloo over the loopback")
    for part in arguments.parts or PARTS:
        PARTS[part](report, measure(part, arguments.repeats, arguments.seconds, arguments.workload))
    report.show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()
