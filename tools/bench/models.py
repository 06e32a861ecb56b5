"""Saving and restoring checkpoints beside torch.save, torch's DCP and safetensors, and what they take on disk.

A ResNet-50 is trained on digits, once with SGD and momentum and once with AdamW: ten checkpoints of real steps.

- `speed`: saves and restores of the last of them with its optimizer, and how long a background save stops the
  training. Every save ends when the bytes are synced. Files were read just before, so restores measure decoding and
  checking, not the disk;
- `sizes`: what ten of them take, of one run and without a spread; and how long that takes to be restored which takes
  `delta` longest, from the page cache and from the disk;
- `small`: saves of 20,000 tensors of three numbers, all of them changed since the save before;
- `previews`: what `restore(planes=2)` reads of them, and how far its numbers are from the stored ones;
- `overhead`: the same training (of a ResNet-18, whose steps are short enough) with saves as often as `max_stall`
  allows and without, by turns, on all processors: so what is stored in the background takes time from the steps.

    python tools/bench/models.py [PART...] [--repeats 3] [--optimizer adamw] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import warnings
from pathlib import Path

import torch
from models_previews import measure_previews
from models_sizes import measure_frozen, measure_restores, measure_sizes
from models_speed import measure_speed
from models_states import MB, run_apart, size_of, train
from report import Report, make_parser

import datasvc

PARTS = ("speed", "sizes", "previews", "overhead", "small")
OPTIMIZERS = ("sgd", "adamw")


def measure_states(report: Report, settings: argparse.Namespace, optimizer: str, folder: Path) -> None:
    """Add the figures of saved states."""
    states = train(
        folder / "states",
        optimizer,
        model=settings.model,
        checkpoints=settings.checkpoints,
        steps=settings.steps,
    )
    report.add_row(f"{optimizer}: state", "MB", [size_of(states[-1]) / MB])
    if "speed" in settings.parts:
        measure_speed(report, states, folder, optimizer=optimizer, repeats=settings.repeats)
    weights = [{"model": each["model"]} for each in states]
    kinds = {"weights": weights, "whole states": states}
    if "previews" in settings.parts:
        for kind, each in kinds.items():
            measure_previews(report, each, folder / "previews", what=f"{optimizer}: {len(states)} {kind}")
    if "sizes" in settings.parts:
        for kind, each in kinds.items():
            what = f"{optimizer}: {len(states)} {kind}"
            measure_sizes(report, each, folder / "sizes", what=what)
            measure_restores(report, each, folder / "sizes", what=what, repeats=settings.repeats)
        measure_frozen(report, folder / "frozen", optimizer=optimizer, model=settings.model, steps=settings.steps)


def measure_overhead(report: Report, settings: argparse.Namespace, optimizer: str, folder: Path) -> None:
    """Add what saves cost the steps of a training: the cycles of `models_overhead.py`."""
    share = settings.max_stall
    printed = run_apart(
        "models_overhead.py",
        *(str(folder / "repository"), optimizer, "--cycles", str(settings.repeats), "--max-stall", share),
        *("--model", settings.overhead_model),
    )
    cycles = json.loads(printed)
    with_saves_s = [each["took_s"] / each["num_steps"] for each in cycles]
    plain_s = [each["plain_step_s"] for each in cycles]
    report.add_row(f"{optimizer}: step without saves", "ms", [each * 1e3 for each in plain_s])
    report.add_row(f"{optimizer}: step at {share}", "ms", [each * 1e3 for each in with_saves_s])
    report.add_row(f"{optimizer}: from save to save at {share}", "s", [each["took_s"] for each in cycles])
    report.add_row(f"{optimizer}: stall / time at {share}", "", [each["stall_s"] / each["took_s"] for each in cycles])
    counted = [(each["stall_s"] + each["slowed_s"]) / each["took_s"] for each in cycles]
    report.add_row(f"{optimizer}: stall and slower steps / time at {share}, as counted", "", counted)
    report.add_ratio(f"{optimizer}: step at {share} / step without saves", with_saves_s, plain_s)


def measure_small(report: Report, folder: Path, repeats: int) -> None:
    """Add what a save of many small tensors takes, by turns with torch.save to a file that is synced."""
    state = {f"layer.{number}": torch.full((3,), float(number)) for number in range(20_000)}
    repository = datasvc.open(str(folder / "small"), create=True)
    torch_s, ours_s = [], []
    for step in range(repeats + 1):  # the first save is a warm-up: it has no version before it
        for tensor in state.values():
            tensor.add_(1e-3)
        began_s = time.perf_counter()
        with (folder / "small.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        torch_s.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        repository.models.save("small", state, step=step)
        ours_s.append(time.perf_counter() - began_s)
    report.add_row("20,000 tensors: torch.save", "s", torch_s[1:])
    report.add_ratio("20,000 tensors: save / torch.save", ours_s[1:], torch_s[1:])


def main() -> None:
    """Parse the command line, measure, and show the figures."""
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[[], *PARTS], help="default: all")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=None, help="default: both, one after another")
    parser.add_argument("--model", default="resnet50", help="speed, sizes: default: %(default)s")
    parser.add_argument("--steps", type=int, default=10, help="between checkpoints; default: %(default)s")
    parser.add_argument("--checkpoints", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--max-stall", default="3%", help="overhead: default: %(default)s")
    parser.add_argument("--overhead-model", default="resnet18", help="overhead: default: %(default)s")
    settings = parser.parse_args()
    settings.parts = settings.parts or PARTS
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it shall be: one process
    report = Report(f"Checkpoints of {settings.model}, {settings.steps} steps apart")
    for optimizer in [settings.optimizer] if settings.optimizer else OPTIMIZERS:
        with tempfile.TemporaryDirectory(prefix="datasvc-bench-") as folder:
            if set(settings.parts) & {"speed", "sizes", "previews"}:
                measure_states(report, settings, optimizer, Path(folder))
            if "overhead" in settings.parts:
                measure_overhead(report, settings, optimizer, Path(folder))
    if "small" in settings.parts:
        with tempfile.TemporaryDirectory(prefix="datasvc-bench-") as folder:
            measure_small(report, Path(folder), settings.repeats)
    report.show(as_json=settings.as_json)


if __name__ == "__main__":
    main()
