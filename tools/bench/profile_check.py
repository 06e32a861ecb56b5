"""Predicted by measured step time of two ranks, for steps that are serial, prefetched and overlapped.

`python -m datasvc.trainer profile --check` measures the parts of a step, predicts the three ways to arrange them, and
then runs each, in turn. Every round measures and predicts anew, so that other load of the machine is in both;
a ratio is taken within each round. Two workloads on digits enlarged to 64x64, gloo over the loopback: the recipe's
small CNN, where loading is a large part, and ResNet-18, which sends 45 MB in several messages.

    python tools/bench/profile_check.py [--repeats 15] [--steps 10] [--threads 1] [--within 0.1] [--json]

With `--within 0.1` the status is 1 if a median ratio is more than 10 % from 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import ROOT, Figure, Report, make_parser

from datasvc.repository import Repository
from datasvc.shards import ingest

RANKS = 2
WORKLOADS = {
    "small CNN": ["--model", "small-cnn", "--batch-size", "64", "--size", "64"],
    "ResNet-18": ["--model", "resnet18", "--batch-size", "8", "--size", "64"],
}


def measure(
    options: list[str],
    repository: str,
    repeats: int,
    steps: int,
    threads: int,
    *,
    data: str = "digits",
    ranks: int = RANKS,
) -> dict[str, Any]:
    """Return the profile of a workload, whose ranks compute in so many threads each."""
    # The ranks must not find this folder's trainer.py where they import the package: -P.
    python = [sys.executable, "-P", "-m"]
    launch = [*python, "datasvc.trainer.launch", "-np", str(ranks), "--no-prefix"]
    command = [*launch, *python, "datasvc.trainer", "profile"]
    told = ["--data", data, "--repo", repository, *options, "--check", "--json"]
    counts = ["--rounds", str(repeats), "--steps", str(steps)]
    # Packages may lie in a folder that only PYTHONPATH names.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([*command, *told, *counts], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=15)
    parser.add_argument("--steps", type=int, default=10, help="of a block that is timed; default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="that each rank computes in; default: %(default)s")
    parser.add_argument("--within", type=float, help="fail if predictions are farther off, 0.1 for 10 %%")
    arguments = parser.parse_args()
    report = Report(f"{RANKS} ranks of {arguments.threads} threads, gloo over the loopback")
    with tempfile.TemporaryDirectory() as folder:
        digits, repository = Path(folder, "digits"), str(Path(folder, "repo"))
        subprocess.run([sys.executable, str(ROOT / "tools" / "make_digits.py"), str(digits)], check=True, stdout=2)
        ingest(Repository.create(repository), str(digits), "digits")
        for workload, options in WORKLOADS.items():
            profile = measure(options, repository, arguments.repeats, arguments.steps, arguments.threads)
            add_profile(report, workload, profile)
    report.show(as_json=arguments.as_json)
    if arguments.within is not None:
        off = far_off(report.ratios, arguments.within)
        if off:
            sys.exit(f"farther than {arguments.within:.0%} from what was measured: {', '.join(off)}")


def add_profile(report: Report, workload: str, profile: dict[str, Any]) -> None:
    """Add the measured steps of a profile, and the predicted ones by them."""
    for mode in profile["measured"]:
        measured_s, predicted_s = (
            [each[name][mode] for each in profile["rounds"]] for name in ("measured_s", "predicted_s")
        )
        report.add_row(f"{workload}, {mode}: measured", "ms/step", [1e3 * seconds for seconds in measured_s])
        report.add_ratio(f"{workload}, {mode}: predicted / measured", predicted_s, measured_s)


def far_off(ratios: Sequence[Figure], within: float) -> list[str]:
    """Return the names of the ratios whose medians are farther from 1."""
    medians = {ratio.name: ratio.to_dict()["median"] for ratio in ratios}
    return [f"{name} {median:.3f}" for name, median in medians.items() if abs(median - 1) > within]


if __name__ == "__main__":
    main()
