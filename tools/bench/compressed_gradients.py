"""Accuracy and bytes of `--compression powersgd:2` beside no compression: whole training programs on the digits.

Two gloo ranks in a network namespace of their own, whose loopback counts the bytes of a run: the data are read from
files. Every repeat is a seed, with which both train. Needs root, iproute2 (`ip`) and util-linux (`unshare`).

    python tools/bench/compressed_gradients.py [--repeats 5] [--epochs 12] [--compression powersgd:2] [--json]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

from report import ROOT, Report, make_parser

import datasvc

PLAIN = "none"
# A run in a network namespace of its own; then the bytes that its loopback has carried.
INSIDE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && "$@" >&2 && cat /proc/net/dev', "sh")


def train(url: str, compression: str, seed: int, epochs: int) -> tuple[float, float]:
    """Return the accuracy and the bytes that the loopback carried."""
    name = f"{compression.replace(':', '-')}-{seed}"
    launch = [sys.executable, "-P", "-m", "datasvc.trainer.launch", "-np", "2"]
    # fmt: off
    options = [
        "--data", "digits@1", "--repo", url, "--name", name, "--size", "32", "--resize", "32", "--scale", "0.8", "1",
        "--flip", "0", "--epochs", str(epochs), "--batch-size", "48", "--checkpoint-every", "1000",
        "--seed", str(seed), "--compression", compression,
    ]
    # fmt: on
    # The ranks must not find this folder's trainer.py where they import the package: -P.
    command = [*INSIDE, *launch, sys.executable, "-P", "-m", "datasvc.trainer", *options]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"a run failed; it needs root, iproute2 and util-linux:\n{done.stderr}")
    (line,) = (line for line in done.stdout.splitlines() if line.strip().startswith("lo:"))
    metrics = datasvc.open(url).models.describe(name).entry["metrics"]
    return metrics["val_accuracy"], float(line.split()[1])


def run(arguments: argparse.Namespace) -> Report:
    """Train with every seed, and return the figures."""
    accuracies: dict[str, list[float]] = {PLAIN: [], arguments.compression: []}
    sent: dict[str, list[float]] = {PLAIN: [], arguments.compression: []}
    with tempfile.TemporaryDirectory() as folder:
        make = [sys.executable, ROOT / "tools" / "make_digits.py", f"{folder}/digits"]
        subprocess.run(make, stdout=subprocess.DEVNULL, check=True)  # only the figures are printed
        url = f"{folder}/repo"
        datasvc.open(url, create=True).datasets.ingest(f"{folder}/digits", "digits", shard_bytes=256 << 10)
        for seed in range(arguments.repeats):
            for compression, values in accuracies.items():
                accuracy, size_bytes = train(url, compression, seed, arguments.epochs)
                values.append(accuracy)
                sent[compression].append(size_bytes / 1e6)
    report = Report(f"Digits, two ranks, {arguments.epochs} epochs")
    for compression, values in accuracies.items():
        report.add_row(f"{compression}: accuracy", "", values)
        report.add_row(f"{compression}: bytes over the loopback", "MB", sent[compression])
    report.add_ratio(f"{PLAIN} / {arguments.compression}, bytes", sent[PLAIN], sent[arguments.compression])
    return report


def main() -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--epochs", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--compression", default="powersgd:2", help="default: %(default)s")
    arguments = parser.parse_args()
    run(arguments).show(as_json=arguments.as_json)


if __name__ == "__main__":
    main()
