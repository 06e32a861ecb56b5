"""What consecutive checkpoints take on disk, and what that costs their restores: see `models.py`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from models_states import NO_CODE, State, size_of, tensors_of, timed, train, warm_memory
from report import Report, alternate

from datasvc.models import restore, save
from datasvc.models.tensors.write import CODECS
from datasvc.repository import Repository


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
    slowest = max(refs, key=lambda ref: min(_restore(delta, ref) for _ in range(3)))
    for place, forget in {"page cache": None, "disk": folder}.items():
        contestants = {
            str(codec): partial(_restore, Repository.open(str(folder / codec)), slowest, forget=forget)
            for codec in CODECS
        }
        took = alternate(contestants, repeats)
        for codec in ("planes", "delta"):
            report.add_ratio(
                f"{what}, from the {place}: time of the slowest delta, {codec} / none", took[codec], took["none"]
            )


def _restore(repository: Repository, ref: str, *, forget: Path | None = None) -> float:
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
