"""Saving and restoring checkpoints: what they take on disk, and what they cost a training."""

from __future__ import annotations

import itertools
import os
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.progress import track

import datasvc
from datasvc.models import CheckpointManager, restore, save
from datasvc.models.tensors.write import CODECS
from datasvc.repository import Repository
from tools.bench.model_states import MB, NO_CODE, State, Training, size_of, tensors_of, train, warm_memory
from tools.bench.models_speed import measure_speed, sync_file
from tools.bench.runner import Options, Report, bench, call_apart, column, run_rounds, timed

PARTS = ("speed", "sizes", "previews", "overhead", "small")
OPTIMIZERS = ("sgd", "adamw")
WARM_UP_STEPS: Final = 5
NUM_SMALL: Final = 20_000


@bench(
    repeats=3,
    positional={"parts": {"nargs": "*", "metavar": "PART", "choices": [[], *PARTS], "help": "default: all"}},
    optimizer={"choices": OPTIMIZERS, "help": "default: both, one after another"},
    model=("resnet50", "speed, sizes"),
    steps=(10, "between checkpoints"),
    checkpoints=10,
    max_stall={"default": "3%", "help": "overhead: default: %(default)s"},
    overhead_model=("resnet18", "overhead"),
)
def models(options: Options) -> Report:
    """Saving and restoring checkpoints beside torch.save, torch's DCP and safetensors, and what they take on disk.

    A ResNet-50 is trained on digits, once with SGD and momentum and once with AdamW: ten checkpoints of real steps.

    - `speed`: saves and restores of the last of them with its optimizer, and how long a background save stops the
      training. Every save ends when the bytes are synced. Files were read just before, so restores measure decoding
      and checking, not the disk;
    - `sizes`: what ten of them take, of one run and without a spread; and how long that takes to be restored which
      takes `delta` longest, from the page cache and from the disk;
    - `small`: saves of 20,000 tensors of three numbers, all of them changed since the save before;
    - `previews`: what `restore(planes=2)` reads of them, and how far its numbers are from the stored ones;
    - `overhead`: the same training (of a ResNet-18, whose steps are short enough) with saves as often as `max_stall`
      allows and without, by turns, on all processors: so what is stored in the background takes time from the steps.
    """
    parts = options.parts or PARTS
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it shall be: one process
    report = Report(f"Checkpoints of {options.model}, {options.steps} steps apart")
    for optimizer in [options.optimizer] if options.optimizer else OPTIMIZERS:
        folder = options.folder / optimizer
        folder.mkdir()
        if set(parts) & {"speed", "sizes", "previews"}:
            measure_states(report, options, parts, optimizer, folder)
        if "overhead" in parts:
            measure_overhead(report, options, optimizer, folder)
        shutil.rmtree(folder)
    if "small" in parts:
        measure_small(report, options.folder, options.repeats)
    return report


def measure_states(report: Report, settings: Options, parts: Sequence[str], optimizer: str, folder: Path) -> None:
    """Add the figures of saved states."""
    states = train(
        folder / "states",
        optimizer,
        model=settings.model,
        checkpoints=settings.checkpoints,
        steps=settings.steps,
    )
    report.add_row(f"{optimizer}: state", "MB", [size_of(states[-1]) / MB])
    if "speed" in parts:
        measure_speed(report, states, folder, optimizer=optimizer, repeats=settings.repeats)
    weights = [{"model": each["model"]} for each in states]
    kinds = {"weights": weights, "whole states": states}
    if "previews" in parts:
        for kind, each in kinds.items():
            measure_previews(report, each, folder / "previews", what=f"{optimizer}: {len(states)} {kind}")
    if "sizes" in parts:
        for kind, each in kinds.items():
            what = f"{optimizer}: {len(states)} {kind}"
            measure_sizes(report, each, folder / "sizes", what=what)
            measure_restores(report, each, folder / "sizes", what=what, repeats=settings.repeats)
        measure_frozen(report, folder / "frozen", optimizer=optimizer, model=settings.model, steps=settings.steps)


def measure_overhead(report: Report, settings: Options, optimizer: str, folder: Path) -> None:
    """Add what saves cost the steps of a training, by its cycles."""
    share = settings.max_stall
    cycles = call_apart(
        run_cycles, folder / "repository", optimizer, settings.overhead_model, share, settings.repeats
    )
    took_s = column(cycles, "took_s")
    with_saves_s = [each["took_s"] / each["num_steps"] for each in cycles]
    plain_s = column(cycles, "plain_step_s")
    report.add_row(f"{optimizer}: step without saves", "ms", [each * 1e3 for each in plain_s])
    report.add_row(f"{optimizer}: step at {share}", "ms", [each * 1e3 for each in with_saves_s])
    report.add_row(f"{optimizer}: from save to save at {share}", "s", took_s)
    report.add_row(f"{optimizer}: stall / time at {share}", "", [each["stall_s"] / each["took_s"] for each in cycles])
    counted = [(each["stall_s"] + each["slowed_s"]) / each["took_s"] for each in cycles]
    report.add_row(f"{optimizer}: stall and slower steps / time at {share}, as counted", "", counted)
    report.add_ratio(f"{optimizer}: step at {share} / step without saves", with_saves_s, plain_s)


def measure_small(report: Report, folder: Path, repeats: int) -> None:
    """Add what a save of many small tensors takes, by turns with torch.save to a file that is synced."""
    state = {f"layer.{number}": torch.full((3,), float(number)) for number in range(NUM_SMALL)}
    repository = datasvc.open(str(folder / "small"), create=True)

    steps = itertools.count()

    def change() -> None:
        for tensor in state.values():
            tensor.add_(1e-3)

    def save_plainly() -> None:
        torch.save(state, folder / "small.pt")
        sync_file(folder / "small.pt")

    def time_save(action: Any) -> float:
        change()
        return timed(action)

    arms = {
        "torch.save": partial(time_save, save_plainly),
        "save": partial(time_save, lambda: repository.models.save("small", state, step=next(steps))),
    }
    seconds = run_rounds(arms, repeats, warm_up=True)  # the first save has no version before it
    report.add_row("20,000 tensors: torch.save", "s", seconds["torch.save"])
    report.add_ratio("20,000 tensors: save / torch.save", seconds["save"], seconds["torch.save"])


def measure_sizes(report: Report, states: Sequence[State], folder: Path, *, what: str) -> None:
    """Add what consecutive states take, over their bytes in memory."""
    raw = sum(size_of(state) for state in states)
    for codec in CODECS:
        target = folder / codec
        shutil.rmtree(target, ignore_errors=True)
        repository = Repository.create(str(target))
        for step, state in enumerate(states):
            save(repository, "resnet", state, step=step, codec=codec, code=NO_CODE)
        report.add_row(f"{what}, codec {codec}: stored / raw", "", [_size_on_disk(target) / raw])


def measure_restores(report: Report, states: Sequence[State], folder: Path, *, what: str, repeats: int) -> None:
    """Add how long the version takes that takes longest, of those which `measure_sizes` stored, beside raw bytes."""
    delta = Repository.open(str(folder / "delta"))
    refs = [f"resnet@{number}" for number in range(1, len(states) + 1)]
    slowest = max(refs, key=lambda ref: min(_time_restore(delta, ref) for _ in range(3)))
    for place, forget in {"page cache": None, "disk": folder}.items():
        arms = {
            str(codec): partial(_time_restore, Repository.open(str(folder / codec)), slowest, forget=forget)
            for codec in CODECS
        }
        took = run_rounds(arms, repeats)
        for codec in ("planes", "delta"):
            report.add_ratio(
                f"{what}, from the {place}: time of the slowest delta, {codec} / none", took[codec], took["none"]
            )


def _time_restore(repository: Repository, ref: str, *, forget: Path | None = None) -> float:
    """Return the seconds that a restore takes, for which files below `forget` must be read from the disk."""
    warm_memory(1 << 30)
    if forget is not None:
        os.sync()
        for path in forget.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return timed(lambda: restore(repository, ref))


def measure_frozen(report: Report, folder: Path, *, optimizer: str, model: str, steps: int) -> None:
    """Add what a further checkpoint takes where only the last layer learns, over its bytes in memory."""
    states = train(folder, optimizer, model=model, checkpoints=2, steps=steps, frozen=True)
    first, second = ({"model": each["model"]} for each in states)
    repository = Repository.create(str(folder / "repository"))
    save(repository, "resnet", first, step=0, code=NO_CODE)
    before = _size_on_disk(folder / "repository")
    save(repository, "resnet", second, step=1, code=NO_CODE)
    raw, old = size_of(second), tensors_of(first)
    changed = sum(each.nbytes for name, each in tensors_of(second).items() if not torch.equal(each, old[name]))
    report.add_row(f"{optimizer}: frozen backbone: changed / all", "", [changed / raw])
    report.add_row(
        f"{optimizer}: frozen backbone: added / all", "", [(_size_on_disk(folder / "repository") - before) / raw]
    )


def _size_on_disk(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure_previews(report: Report, states: Sequence[State], folder: Path, *, what: str) -> None:
    """Add the bytes that `planes=2` reads of each consecutive version, over all, and its largest relative error."""
    for codec in ("planes", "delta"):
        target = folder / codec
        shutil.rmtree(target, ignore_errors=True)
        repository = Repository.create(str(target))
        shares, errors = [], []
        for step, state in enumerate(states):
            version = save(repository, "resnet", state, step=step, codec=codec, code=NO_CODE)
            preview = restore(repository, version, planes=2)
            read = sum(preview.report.came_bytes.values())
            shares.append(read / sum(restore(repository, version).report.came_bytes.values()))
            errors.append(_largest_error(tensors_of(state), tensors_of(preview.state)))
        report.add_row(f"{what}, codec {codec}: read by planes=2 / stored", "", shares)
        report.add_row(f"{what}, codec {codec}: largest relative error of planes=2", "", errors)


def _largest_error(exact: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> float:
    """Return the largest relative error of normal numbers; smaller ones have a bound of their own."""
    largest = 0.0
    for name, tensor in exact.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        is_normal = tensor.abs() >= torch.finfo(tensor.dtype).tiny
        difference = (found[name] - tensor).abs() / tensor.abs()
        largest = max(largest, float(difference[is_normal].max()) if bool(is_normal.any()) else 0.0)
    return largest


@dataclass(frozen=True)
class Cycle:
    """A save, and the steps up to the next one.

    Attributes:
        num_steps: as many.
        took_s: all of it.
        stall_s: for which the save stopped the training, as the model counted it.
        slowed_s: by which steps took longer beside its writing, as the model counted it.
        plain_step_s: what a step takes without saves, before and after.
    """

    num_steps: int
    took_s: float
    stall_s: float
    slowed_s: float
    plain_step_s: float = 0.0


class Turns:
    """A training that runs with saves and without, by turns.

    Args:
        training: takes the steps.
        saved: what it saves to, by its `should_save`.
    """

    def __init__(self, training: Training, saved: CheckpointManager) -> None:
        self._training = training
        self._saved = saved
        self._step = 0

    def run_plain(self, num_steps: int) -> float:
        """Return the seconds that a step takes without saves."""
        began = time.perf_counter()
        for _ in range(num_steps):
            self._training.step()
        return (time.perf_counter() - began) / num_steps

    def run_to_save(self) -> None:
        """Go on until a save is due."""
        while not self._take_step():
            pass

    def run_cycle(self) -> Cycle:
        """Save, and go on until the next save is due."""
        before, began, first = self._saved.cost, time.perf_counter(), self._step
        self._saved.save(self._training.state(), step=first)
        self.run_to_save()
        took_s = time.perf_counter() - began
        spent = self._saved.cost - before
        return Cycle(self._step - first, took_s, spent.stall_s, spent.slowed_s)

    def _take_step(self) -> bool:
        self._training.step()
        self._step += 1
        return self._saved.should_save(self._step)


def run_cycles(folder: str, optimizer: str, model: str, max_stall: str, num_cycles: int) -> list[dict[str, float]]:
    """Return the figures of each cycle: all steps from a save to the moment at which the next one is allowed.

    Before and after it, half as many run without saves. Call it in a process of its own.
    """
    training = Training(optimizer, frozen=False, model=model)
    repository = datasvc.open(folder, create=True)
    console = Console(stderr=True)
    with repository.models.manager("net", max_stall=max_stall) as saved:
        turns, cycles = Turns(training, saved), []
        turns.run_plain(WARM_UP_STEPS)
        turns.run_to_save()
        # The first save has no other to be a difference to, and memory to touch: it is not counted.
        before_s = turns.run_plain(turns.run_cycle().num_steps // 2)
        numbers = track(range(num_cycles), "steps beside saves", console=console, disable=not console.is_terminal)
        for _ in numbers:
            cycle = turns.run_cycle()
            after_s = turns.run_plain(cycle.num_steps // 2)
            cycles.append(replace(cycle, plain_step_s=(before_s + after_s) / 2))
            before_s = after_s
    return [asdict(cycle) for cycle in cycles]
