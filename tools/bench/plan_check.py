"""Estimated by measured step time of the layouts that `python -m datasvc.trainer plan` ranks first, on four ranks.

A small GPT with many parameters for its tokens, so that layouts differ in what they send; gloo over the loopback.
Every repeat measures compute times and the loopback, estimates the step of each layout from them, and runs the steps
of all layouts in turn, so that other load of the machine is in both. The ranking is that of the medians.

    python tools/bench/plan_check.py [--repeats 7] [--steps 1] [--layouts 8] [--ranks 4] [--tokens 16]
                                     [--beside LAYOUT] [--strict] [--json]

With `--beside data=2`, each layout is also compared with that one: measured time / its measured time. With `--strict`
the status is 1 if the best three layouts are estimated in another order than they were measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from report import ROOT, Report, make_parser

NUM_BEST = 3
Seconds = Mapping[str, Sequence[float]]


def measure(arguments: argparse.Namespace) -> tuple[Seconds, Seconds]:
    """Return the measured and the estimated seconds per step of each layout, one of each repeat."""
    # The ranks must not find this folder's trainer.py where they import the package: -P.
    launch = [sys.executable, "-P", "-m", "datasvc.trainer.launch", "-np", str(arguments.ranks), "--no-prefix"]
    program = [sys.executable, "-P", str(Path(__file__).with_name("plan_check_rank.py"))]
    options = [f"--{name}={getattr(arguments, name)}" for name in ("repeats", "steps", "layouts", "tokens")]
    # Packages may lie in a folder that only PYTHONPATH names.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *program, *options], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    measured, estimated = defaultdict(list), defaultdict(list)
    for line in map(json.loads, done.stdout.splitlines()):
        measured[line["layout"]].append(line["measured_s"])
        estimated[line["layout"]].append(line["estimated_s"])
    return measured, estimated


def rank_medians(seconds: Seconds) -> list[str]:
    """Return the layouts, the one with the shortest median first."""
    return sorted(seconds, key=lambda layout: statistics.median(seconds[layout]))


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=7)
    parser.add_argument("--steps", type=int, default=1, help="of a block that is timed; default: %(default)s")
    parser.add_argument("--layouts", type=int, default=8, help="best of the ranking to run; default: %(default)s")
    parser.add_argument("--ranks", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=16, help="of a block; default: %(default)s")
    parser.add_argument("--beside", metavar="LAYOUT", help="compare the measured times with those of this layout")
    parser.add_argument("--strict", action="store_true", help="fail if the order of the best three is another one")
    arguments = parser.parse_args()
    measured, estimated = measure(arguments)
    if arguments.beside is not None and arguments.beside not in measured:
        sys.exit(f"no layout {arguments.beside} among those that ran: {'; '.join(measured)}")
    best, expected = rank_medians(measured)[:NUM_BEST], rank_medians(estimated)[:NUM_BEST]
    report = Report(
        f"{arguments.ranks} ranks of one thread, gloo over the loopback",
        f"best measured: {'; '.join(best)}\nbest estimated: {'; '.join(expected)}",
    )
    for layout in rank_medians(measured):
        report.add_row(f"{layout}: measured", "ms/step", [1e3 * seconds for seconds in measured[layout]])
        report.add_row(f"{layout}: estimated", "ms/step", [1e3 * seconds for seconds in estimated[layout]])
        report.add_ratio(f"{layout}: estimated / measured", estimated[layout], measured[layout])
        if arguments.beside not in (None, layout):
            report.add_ratio(f"{layout} / {arguments.beside}: measured", measured[layout], measured[arguments.beside])
    report.show(as_json=arguments.as_json)
    if arguments.strict and best != expected:
        sys.exit(f"measured: {'; '.join(best)}; estimated: {'; '.join(expected)}")


if __name__ == "__main__":
    main()
