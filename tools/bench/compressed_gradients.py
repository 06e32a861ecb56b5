"""Accuracy and bytes of compressed gradients, by whole training programs."""

from __future__ import annotations

import subprocess
import sys

import datasvc
from tools.bench.runner import ROOT, Options, Report, bench, column, environment, launch_command, turns

PLAIN = "none"
# A run in a network namespace of its own; then the bytes that its loopback has carried.
INSIDE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && "$@" >&2 && cat /proc/net/dev', "sh")


@bench(repeats=5, epochs=12, compression="powersgd:2")
def compressed_gradients(options: Options) -> Report:
    """Accuracy and bytes of `--compression powersgd:2` beside no compression: whole training programs on the digits.

    Two gloo ranks in a network namespace of their own, whose loopback counts the bytes of a run: the data are read
    from files. Every round is a seed, with which both train. Needs root, iproute2 (`ip`) and util-linux (`unshare`).
    """
    digits, url = options.folder / "digits", str(options.folder / "repo")
    make = [sys.executable, ROOT / "tools" / "make_digits.py", digits]
    subprocess.run(make, stdout=subprocess.DEVNULL, check=True)  # only the figures are printed
    datasvc.open(url, create=True).datasets.ingest(str(digits), "digits", shard_bytes=256 << 10)
    found: dict[str, list[dict[str, float]]] = {PLAIN: [], options.compression: []}
    for seed, compression in turns(found, options.repeats):
        found[compression].append(train(url, compression, seed, options.epochs))
    report = Report(f"Digits, two ranks, {options.epochs} epochs")
    for compression, values in found.items():
        report.add_row(f"{compression}: accuracy", "", column(values, "accuracy"))
        report.add_row(f"{compression}: bytes over the loopback", "MB", column(values, "sent_mb"))
    sent_mb = (column(found[compression], "sent_mb") for compression in (PLAIN, options.compression))
    report.add_ratio(f"{PLAIN} / {options.compression}, bytes", *sent_mb)
    return report


def train(url: str, compression: str, seed: int, epochs: int) -> dict[str, float]:
    """Return the accuracy and the bytes that the loopback carried."""
    name = f"{compression.replace(':', '-')}-{seed}"
    # fmt: off
    options = [
        "--data", "digits@1", "--repo", url, "--name", name, "--size", "32", "--resize", "32", "--scale", "0.8", "1",
        "--flip", "0", "--epochs", str(epochs), "--batch-size", "48", "--checkpoint-every", "1000",
        "--seed", str(seed), "--compression", compression,
    ]
    # fmt: on
    command = [*INSIDE, *launch_command(2), sys.executable, "-m", "datasvc.trainer", *options]
    variables = environment(OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"a run failed; it needs root, iproute2 and util-linux:\n{done.stderr}")
    (line,) = (line for line in done.stdout.splitlines() if line.strip().startswith("lo:"))
    metrics = datasvc.open(url).models.describe(name).entry["metrics"]
    return {"accuracy": metrics["val_accuracy"], "sent_mb": float(line.split()[1]) / 1e6}
