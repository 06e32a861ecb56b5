"""How fast a state is saved and restored, and how long a background save stops the training: see `models.py`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from models_states import MB, NO_CODE, State, in_memory, size_of, tensors_of, timed
from report import Contestants, Report, alternate
from safetensors.torch import load_file, save_file

import datasvc
from datasvc.models import restore, save
from datasvc.models.store import CODECS
from datasvc.repository import Repository


def measure_speed(report: Report, states: Sequence[State], folder: Path, *, optimizer: str, repeats: int) -> None:
    """Add how long it takes to save and to restore the last of `states`."""
    size = size_of(states[-1])
    before, state = map(in_memory, states[-2:])
    saved = alternate(_savers(before, state, folder), repeats)
    for name, values in saved.items():
        report.add_row(f"{optimizer}: save, {name}", "MB/s", [size / MB / each for each in values])
    stalls = alternate(_stallers(state, folder), repeats)
    for name, values in stalls.items():
        report.add_row(f"{optimizer}: blocked by {name}", "ms", [each * 1e3 for each in values])
    loaded = alternate(_loaders(states, folder), repeats)
    for name, values in loaded.items():
        report.add_row(f"{optimizer}: restore, {name}", "MB/s", [size / MB / each for each in values])
    for codec in CODECS:
        own = f"datasvc, codec {codec}"
        report.add_ratio(f"{optimizer}: speed of saves, {own} / DCP", saved["DCP"], saved[own])
        report.add_ratio(f"{optimizer}: speed of restores, {own} / DCP", loaded["DCP"], loaded[own])
    blocked_s = stalls["datasvc Model.save"]
    report.add_ratio(f"{optimizer}: blocked, datasvc / torch.save", blocked_s, saved["torch.save"])
    report.add_ratio(f"{optimizer}: blocked, datasvc / DCP async_save", blocked_s, stalls["DCP async_save"])


def _savers(before: State, state: State, folder: Path) -> Contestants:
    """Return what saves `state` to a new place each time; those of datasvc follow a version with `before`."""

    def torch_save() -> float:
        with _emptied_folder(folder / "torch") as target:
            target.mkdir()
            return timed(lambda: (torch.save(state, target / "state.pt"), _sync(target / "state.pt")))

    def safetensors_save() -> float:
        with _emptied_folder(folder / "safetensors") as target:
            target.mkdir()
            path = target / "state.safetensors"
            return timed(lambda: (save_file(tensors_of(state), path), _sync(path)))

    def dcp_save(threads: int) -> float:
        with _emptied_folder(folder / "dcp") as target:
            writer = dcp.FileSystemWriter(target, thread_count=threads)
            return timed(lambda: dcp.save(dict(state), storage_writer=writer, no_dist=True))

    def own_save(codec: Any) -> float:
        with _emptied_folder(folder / "own") as target:
            repository = Repository.create(str(target))
            save(repository, "resnet", before, step=0, codec=codec, code=NO_CODE)
            os.sync()
            return timed(lambda: save(repository, "resnet", state, step=1, codec=codec, code=NO_CODE))

    own = {f"datasvc, codec {codec}": lambda codec=codec: own_save(codec) for codec in CODECS}
    return {
        "torch.save": torch_save,
        "safetensors": safetensors_save,
        "DCP": lambda: dcp_save(1),
        "DCP, two threads": lambda: dcp_save(2),
        **own,
    }


def _stallers(state: State, folder: Path) -> Contestants:
    """Return what begins to save `state` in the background; the time until it returns."""

    def dcp_stall() -> float:
        with _emptied_folder(folder / "dcp") as target:
            began = time.perf_counter()
            pending: Any = dcp.async_save(dict(state), checkpoint_id=target, no_dist=True)
            stall_s = time.perf_counter() - began
            pending.result()
            return stall_s

    target = folder / "own"
    shutil.rmtree(target, ignore_errors=True)
    model = datasvc.open(str(target), create=True).model("resnet", codec="planes")

    def own_stall() -> float:
        began = time.perf_counter()
        handle = model.save(state, step=0)
        stall_s = time.perf_counter() - began
        handle.result()
        return stall_s

    for _ in range(2):  # both buffers are filled for the first time
        own_stall()
    return {"DCP async_save": dcp_stall, "datasvc Model.save": own_stall}


def _loaders(states: Sequence[State], folder: Path) -> Contestants:
    """Return what restores the last of `states` from where it was saved."""
    state = states[-1]
    torch.save(state, folder / "state.pt")
    save_file(tensors_of(state), folder / "state.safetensors")
    dcp.save(dict(state), checkpoint_id=folder / "dcp", no_dist=True)
    repositories = {codec: Repository.create(str(folder / codec)) for codec in CODECS}
    for codec, repository in repositories.items():
        for step, each in enumerate(states):
            save(repository, "resnet", each, step=step, codec=codec, code=NO_CODE)

    def dcp_load() -> float:
        target = {
            "model": {name: torch.empty_like(each) for name, each in state["model"].items()},
            "optimizer": _emptied(state["optimizer"]),
        }
        return timed(lambda: dcp.load(target, checkpoint_id=folder / "dcp", no_dist=True))

    own = {
        f"datasvc, codec {codec}": lambda repository=repository: timed(lambda: restore(repository, "resnet"))
        for codec, repository in repositories.items()
    }
    return {
        "torch.load": lambda: timed(lambda: torch.load(folder / "state.pt", weights_only=True)),
        "safetensors": lambda: timed(lambda: load_file(folder / "state.safetensors")),
        "DCP": dcp_load,
        **own,
    }


def _emptied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value)
    if isinstance(value, Mapping):
        return {key: _emptied(each) for key, each in value.items()}
    return value


def _sync(path: Path) -> None:
    """Let what was written to a file survive a power cut, as all contestants do."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _emptied_folder(folder: Path) -> Iterator[Path]:
    """Give a folder that does not exist yet, and remove it; none of that is timed."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
