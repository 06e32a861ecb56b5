"""How fast a state is saved and restored, and how long a background save stops the training: see `models`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import datasvc
from datasvc.models import restore, save
from datasvc.models.tensors.write import CODECS
from datasvc.repository import Repository
from tools.bench.model_states import MB, NO_CODE, State, in_memory, size_of, tensors_of, warm_memory
from tools.bench.runner import Arms, Report, run_rounds, timed


def measure_speed(report: Report, states: Sequence[State], folder: Path, *, optimizer: str, repeats: int) -> None:
    """Add how long it takes to save and to restore the last of `states`."""
    size = size_of(states[-1])
    before, state = map(in_memory, states[-2:])
    saved = run_rounds(_savers(before, state, folder), repeats)
    for name, values in saved.items():
        report.add_row(f"{optimizer}: save, {name}", "MB/s", [size / MB / each for each in values])
    stalls = run_rounds(_stallers(state, folder), repeats)
    for name, values in stalls.items():
        report.add_row(f"{optimizer}: blocked by {name}", "ms", [each * 1e3 for each in values])
    loaded = run_rounds(_loaders(states, folder), repeats)
    for name, values in loaded.items():
        report.add_row(f"{optimizer}: restore, {name}", "MB/s", [size / MB / each for each in values])
    for codec in CODECS:
        own = f"datasvc, codec {codec}"
        report.add_ratio(f"{optimizer}: speed of saves, {own} / DCP", saved["DCP"], saved[own])
        report.add_ratio(f"{optimizer}: speed of restores, {own} / DCP", loaded["DCP"], loaded[own])
    blocked_s = stalls["datasvc Model.save"]
    report.add_ratio(f"{optimizer}: blocked, datasvc / torch.save", blocked_s, saved["torch.save"])
    report.add_ratio(f"{optimizer}: blocked, datasvc / DCP async_save", blocked_s, stalls["DCP async_save"])


def _savers(before: State, state: State, folder: Path) -> Arms[float]:
    """Return what saves `state` to a new place each time, after it has saved `before`, which stays."""

    def torch_save(state: State, target: Path) -> None:
        torch.save(state, target)
        sync_file(target)

    def safetensors_save(state: State, target: Path) -> None:
        save_file(tensors_of(state), target)
        sync_file(target)

    def dcp_save(state: State, target: Path, threads: int) -> None:
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(target, thread_count=threads), no_dist=True)

    def second_of(save_to: Callable[[State, Path], object]) -> Callable[[], float]:
        def measure() -> float:
            with _emptied_folder(folder / "saved") as target:
                target.mkdir()
                save_to(before, target / "0")
                os.sync()
                warm_memory(4 * size_of(state))
                return timed(lambda: save_to(state, target / "1"))

        return measure

    def own_save(codec: Any) -> float:
        with _emptied_folder(folder / "saved") as target:
            repository = Repository.create(str(target))
            save(repository, "resnet", before, step=0, codec=codec, code=NO_CODE)
            os.sync()
            warm_memory(4 * size_of(state))
            return timed(lambda: save(repository, "resnet", state, step=1, codec=codec, code=NO_CODE))

    own = {f"datasvc, codec {codec}": lambda codec=codec: own_save(codec) for codec in CODECS}
    return {
        "torch.save": second_of(torch_save),
        "safetensors": second_of(safetensors_save),
        "DCP": second_of(lambda state, target: dcp_save(state, target, 1)),
        "DCP, two threads": second_of(lambda state, target: dcp_save(state, target, 2)),
        **own,
    }


def _stallers(state: State, folder: Path) -> Arms[float]:
    """Return what begins to save `state` in the background; the time until it returns."""

    def dcp_stall() -> float:
        with _emptied_folder(folder / "dcp") as target:
            warm_memory(4 * size_of(state))
            began = time.perf_counter()
            pending: Any = dcp.async_save(dict(state), checkpoint_id=target, no_dist=True)
            stall_s = time.perf_counter() - began
            pending.result()
            return stall_s

    target = folder / "own"
    shutil.rmtree(target, ignore_errors=True)
    model = datasvc.open(str(target), create=True).models.manager("resnet", codec="planes")

    def own_stall() -> float:
        warm_memory(4 * size_of(state))
        began = time.perf_counter()
        handle = model.save(state, step=0)
        stall_s = time.perf_counter() - began
        handle.result()
        return stall_s

    for _ in range(2):  # both buffers are filled for the first time
        own_stall()
    return {"DCP async_save": dcp_stall, "datasvc Model.save": own_stall}


def _loaders(states: Sequence[State], folder: Path) -> Arms[float]:
    """Return what restores the last of `states` from where it was saved."""
    state = states[-1]
    torch.save(state, folder / "state.pt")
    save_file(tensors_of(state), folder / "state.safetensors")
    dcp.save(dict(state), checkpoint_id=folder / "dcp", no_dist=True)
    repositories = {codec: Repository.create(str(folder / codec)) for codec in CODECS}
    for codec, repository in repositories.items():
        for step, each in enumerate(states):
            save(repository, "resnet", each, step=step, codec=codec, code=NO_CODE)

    def dcp_load() -> None:
        target = {
            "model": {name: torch.empty_like(each) for name, each in state["model"].items()},
            "optimizer": _emptied(state["optimizer"]),
        }
        dcp.load(target, checkpoint_id=folder / "dcp", no_dist=True)

    def measure(load: Callable[[], object]) -> float:
        warm_memory(4 * size_of(state))
        return timed(load)

    loads: dict[str, Callable[[], object]] = {
        "torch.load": lambda: torch.load(folder / "state.pt", weights_only=True),
        "safetensors": lambda: load_file(folder / "state.safetensors"),
        "DCP": dcp_load,
        **{
            f"datasvc, codec {codec}": lambda each=each: restore(each, "resnet")
            for codec, each in repositories.items()
        },
    }
    return {name: lambda load=load: measure(load) for name, load in loads.items()}


def _emptied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value)
    if isinstance(value, Mapping):
        return {key: _emptied(each) for key, each in value.items()}
    return value


@contextmanager
def _emptied_folder(folder: Path) -> Iterator[Path]:
    """Give a folder that does not exist yet, and remove it; none of that is timed."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def sync_file(path: Path) -> None:
    """Let what was written to a file survive a power cut, as all arms do."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
