"""Accuracy and bytes of compressed gradients, by whole training programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasvc
from tools.bench.runner import ROOT, Options, Report, bench, column, environment, launch_command, turns

PLAIN = "none"
# A run in a network namespace of its own; then the bytes that its loopback has carried.
INSIDE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && "$@" >&2 && cat /proc/net/dev', "sh")


# Settings that a compression needs: with signs, the learning rate is the size of every step.
SETTINGS = {"quantized:signsgd": ("--learning-rate", "0.001", "--momentum", "0")}


@bench(repeats=5, epochs=12, compressions="powersgd:2")
def compressed_gradients(options: Options) -> Report:
    """Accuracy and bytes of compressions beside no compression: whole training programs on the digits.

    `--compressions` are values of `--compression`, separated by commas. Two gloo ranks in a network namespace of
    their own, whose loopback counts the bytes of a run: the data are read from files. Every round is a seed, with
    which all train. Needs root, iproute2 (`ip`) and util-linux (`unshare`).
    """
    url = ingest_digits(options.folder)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (PLAIN, *options.compressions.split(","))}
    for seed, compression in turns(found, options.repeats):
        found[compression].append(train(url, compression, seed, options.epochs))
    report = Report(f"Digits, two ranks, {options.epochs} epochs")
    for compression, values in found.items():
        report.add_row(f"{compression}: accuracy", "", column(values, "accuracy"))
        report.add_row(f"{compression}: bytes over the loopback", "MB", column(values, "sent_mb"))
    plain = column(found.pop(PLAIN), "sent_mb")
    for compression, values in found.items():
        report.add_ratio(f"{PLAIN} / {compression}, bytes", plain, column(values, "sent_mb"))
    return report


def ingest_digits(folder: Path) -> str:
    """Make a repository with the digits in a folder; return its URL."""
    digits, url = folder / "digits", str(folder / "repo")
    make = [sys.executable, str(ROOT / "tools" / "make_digits.py"), str(digits)]
    subprocess.run(make, stdout=subprocess.DEVNULL, check=True)  # only the figures are printed
    datasvc.open(url, create=True).datasets.ingest(str(digits), "digits", shard_bytes=256 << 10)
    return url


def train(url: str, compression: str, seed: int, epochs: int) -> dict[str, float]:
    """Return the accuracy and the bytes that the loopback carried."""
    name = f"{compression.replace(':', '-')}-{seed}"
    # fmt: off
    options = [
        "--data", "digits@1", "--repo", url, "--name", name, "--size", "32", "--resize", "32", "--scale", "0.8", "1",
        "--flip", "0", "--epochs", str(epochs), "--batch-size", "48", "--checkpoint-every", "1000",
        "--seed", str(seed), "--compression", compression, *SETTINGS.get(compression, ()),
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


@bench(repeats=3, steps=(5, "of a block that is timed"), rate=("none", "of the loopback, as tc takes it: 1gbit"))
def compression_advice(options: Options) -> Report:
    """Predicted by measured gain of compressions: `profile --compressions`, then steps with each.

    Two gloo ranks that train ResNet-18 on digits of 64 pixels (45 MB of gradients), in a network namespace of their
    own, whose loopback has the `--rate`. Needs root, iproute2 (`ip`, `tc`) and util-linux (`unshare`).
    """
    url = ingest_digits(options.folder)
    compressions = ("fp16", "quantized:int8", "quantized:onebit")
    measured_s: dict[str, list[float]] = {name: [] for name in (PLAIN, *compressions)}
    gains: dict[str, list[float]] = {name: [] for name in compressions}
    for _ in range(options.repeats):
        advised = profile(url, options, "--compressions", *compressions)["compressions"]
        for step in advised[1:]:
            gains[step["compression"]].append(advised[0]["step_s"] / step["step_s"])
        for name, times in measured_s.items():
            found = profile(url, options, "--check", "--compression", name)
            times.append(found["measured"]["overlapped"]["measured_s"])
    report = Report(f"ResNet-18, two ranks, rate of the loopback: {options.rate}")
    report.add_rows("ms/step", measured_s, lambda seconds: seconds * 1e3)
    for name, predicted in gains.items():
        measured = [plain / other for plain, other in zip(measured_s[PLAIN], measured_s[name], strict=True)]
        report.add_ratio(f"{PLAIN} / {name}, seconds of a step, measured", measured_s[PLAIN], measured_s[name])
        report.add_ratio(f"{name}: predicted / measured gain", predicted, measured)
    return report


def profile(url: str, options: Options, *words: str) -> dict[str, Any]:
    """Return the profile of two ranks behind a loopback of the rate."""
    shape = "ip link set lo up"
    if options.rate != "none":
        shape += f" && tc qdisc add dev lo root tbf rate {options.rate} burst 256kb latency 1s"
    inside = ("unshare", "--net", "sh", "-c", f'{shape} && exec "$@"', "sh")
    task = ["--data", "digits", "--repo", url, "--model", "resnet18", "--batch-size", "8", "--size", "64"]
    counts = ["--rounds", "1", "--steps", str(options.steps), "--json"]
    command = [
        *inside,
        *launch_command(2),
        sys.executable,
        "-m",
        "datasvc.trainer",
        "profile",
        *task,
        *counts,
        *words,
    ]
    variables = environment(OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"a profile failed; it needs root, iproute2 and util-linux:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
