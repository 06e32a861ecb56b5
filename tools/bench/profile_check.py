"""Predicted by measured step time of two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import datasvc
from tools.bench.runner import ROOT, Figure, Options, Report, bench, environment, launch_command

RANKS = 2
WORKLOADS = {
    "small CNN": ["--model", "small-cnn", "--batch-size", "64", "--size", "64"],
    "ResNet-18": ["--model", "resnet18", "--batch-size", "8", "--size", "64"],
}


@bench(
    repeats=15,
    steps=(10, "of a block that is timed"),
    threads=(1, "that each rank computes in"),
    within={"type": float, "help": "fail if predictions are farther off, 0.1 for 10 %%"},
)
def profile_check(options: Options) -> Iterator[Report]:
    """Predicted by measured step time of two ranks, for steps that are serial, prefetched and overlapped.

    `python -m datasvc.trainer profile --check` measures the parts of a step, predicts the three ways to arrange them,
    and then runs each, in turn. Every round measures and predicts again, so that other load of the machine is in
    both; a ratio is taken within each round. Two workloads on digits enlarged to 64x64, gloo over the loopback: the
    recipe's small CNN, where loading is a large part, and ResNet-18, which sends 45 MB in several messages.

    With `--within 0.1` the status is 1 if a median ratio is more than 10 % from 1.
    """
    report = Report(f"{RANKS} ranks of {options.threads} threads, gloo over the loopback")
    digits, repository = options.folder / "digits", str(options.folder / "repo")
    subprocess.run([sys.executable, str(ROOT / "tools" / "make_digits.py"), str(digits)], check=True, stdout=2)
    datasvc.open(repository, create=True).datasets.ingest(str(digits), "digits")
    for workload, words in WORKLOADS.items():
        profile = measure(words, repository, options.repeats, options.steps, options.threads)
        add_profile(report, workload, profile)
    yield report
    off = [] if options.within is None else far_off(report.ratios, options.within)
    if off:
        sys.exit(f"farther than {options.within:.0%} from what was measured: {', '.join(off)}")


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
    command = [*launch_command(ranks), sys.executable, "-m", "datasvc.trainer", "profile"]
    words = ["--data", data, "--repo", repository, *options, "--check", "--json"]
    counts = ["--rounds", str(repeats), "--steps", str(steps)]
    variables = environment(OMP_NUM_THREADS=str(threads))
    done = subprocess.run(
        [*command, *words, *counts], cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


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
