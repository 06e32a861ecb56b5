"""Saving and restoring checkpoints beside torch.save, torch's DCP and safetensors, and what they take on disk.

A ResNet-50 is trained on digits, once with SGD and momentum and once with AdamW: ten checkpoints of real steps.
Speeds are those of the last of them with its optimizer. Every save ends when the bytes are synced. Files were read
just before, so restores measure decoding and checking, not the disk. Sizes are of one run and have no spread.

    python tools/bench/models.py [--repeats 3] [--optimizer adamw] [--steps 10] [--checkpoints 10] [--json]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from report import ROOT, Contestants, Report, alternate, make_parser
from safetensors.torch import load_file, save_file

import datasvc
from datasvc.models import CodeRevision, restore, save
from datasvc.models.store import CODECS
from datasvc.models.tree import flatten, unflatten
from datasvc.repository import Repository

MB: Final = 1e6
NO_CODE = CodeRevision(None, dirty=False)

State = Mapping[str, Any]


def train(folder: Path, settings: argparse.Namespace, checkpoints: int, *options: str) -> list[State]:
    """Return the states of a training, mapped from files in `folder`, which is made."""
    folder.mkdir()
    # -P: the benchmark of the trainer, which lies here, has its name.
    program = [sys.executable, "-P", str(Path(__file__).with_name("models_training.py"))]
    counts = ["--checkpoints", str(checkpoints), "--steps", str(settings.steps)]
    subprocess.run(
        [*program, str(folder), settings.optimizer, *counts, *options],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    paths = [folder / f"{number}.pt" for number in range(checkpoints)]
    return [torch.load(path, mmap=True, weights_only=True) for path in paths]


def in_memory(state: State) -> State:
    """Return a copy that is in no file."""
    skeleton, tensors = flatten(state)
    copy: State = unflatten(skeleton, {name: tensor.clone() for name, tensor in tensors.items()})
    return copy


def tensors_of(state: State) -> dict[str, torch.Tensor]:
    """Return the tensors of a state by name."""
    return flatten(state)[1]


def size_of(state: State) -> int:
    """Return the bytes of a state's tensors."""
    return sum(tensor.nbytes for tensor in tensors_of(state).values())


def size_on_disk(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def sync(path: Path) -> None:
    """Let what was written to a file survive a power cut, as all contestants do."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def emptied(folder: Path) -> Iterator[Path]:
    """Give a folder that does not exist yet, and remove it; none of that is timed."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def savers(before: State, state: State, folder: Path) -> Contestants:
    """Return what saves `state` to a new place each time; those of datasvc follow a version with `before`."""

    def torch_save() -> float:
        with emptied(folder / "torch") as target:
            target.mkdir()
            return timed(lambda: (torch.save(state, target / "state.pt"), sync(target / "state.pt")))

    def safetensors_save() -> float:
        with emptied(folder / "safetensors") as target:
            target.mkdir()
            path = target / "state.safetensors"
            return timed(lambda: (save_file(tensors_of(state), path), sync(path)))

    def dcp_save(threads: int) -> float:
        with emptied(folder / "dcp") as target:
            writer = dcp.FileSystemWriter(target, thread_count=threads)
            return timed(lambda: dcp.save(dict(state), storage_writer=writer, no_dist=True))

    def own_save(codec: Any) -> float:
        with emptied(folder / "own") as target:
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


def stallers(state: State, folder: Path) -> Contestants:
    """Return what begins to save `state` in the background; the time until it returns."""

    def dcp_stall() -> float:
        with emptied(folder / "dcp") as target:
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


def loaders(states: Sequence[State], folder: Path) -> Contestants:
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


def measure_sizes(report: Report, states: Sequence[State], folder: Path, *, what: str) -> None:
    """Add what consecutive states take, over their bytes in memory, and how long each takes to be restored."""
    raw = sum(size_of(state) for state in states)
    for codec in CODECS:
        target = folder / codec
        shutil.rmtree(target, ignore_errors=True)
        repository = Repository.create(str(target))
        for step, state in enumerate(states):
            save(repository, "resnet", state, step=step, codec=codec, code=NO_CODE)
        report.add_row(f"{what}, codec {codec}: stored / raw", "", [size_on_disk(target) / raw])
    plain, delta = Repository.open(str(folder / "none")), Repository.open(str(folder / "delta"))

    def slowest(repository: Repository) -> float:
        refs = [f"resnet@{number}" for number in range(1, len(states) + 1)]
        return max(min(timed(lambda ref=ref: restore(repository, ref)) for _ in range(3)) for ref in refs)

    report.add_ratio(f"{what}: slowest restore, delta / none", [slowest(delta)], [slowest(plain)])


def measure_frozen(report: Report, settings: argparse.Namespace, folder: Path) -> None:
    """Add what a further checkpoint takes where only the last layer learns, over its bytes in memory."""
    states = train(folder, settings, 2, "--frozen")
    first, second = ({"model": each["model"]} for each in states)
    repository = Repository.create(str(folder / "repository"))
    save(repository, "resnet", first, step=0, code=NO_CODE)
    before = size_on_disk(folder / "repository")
    save(repository, "resnet", second, step=1, code=NO_CODE)
    raw, old = size_of(second), tensors_of(first)
    changed = sum(each.nbytes for name, each in tensors_of(second).items() if not torch.equal(each, old[name]))
    report.add_row("frozen backbone: changed / all", "", [changed / raw])
    report.add_row("frozen backbone: added / all", "", [(size_on_disk(folder / "repository") - before) / raw])


def measure_optimizer(settings: argparse.Namespace, folder: Path) -> Report:
    """Return all figures for one optimizer."""
    states = train(folder / "states", settings, settings.checkpoints)
    size = size_of(states[-1])
    before, state = map(in_memory, states[-2:])
    report = Report(
        f"Checkpoints of a ResNet-50 with {settings.optimizer}, {size / MB:.0f} MB, {settings.steps} steps apart"
    )
    saved = alternate(savers(before, state, folder), settings.repeats)
    for name, values in saved.items():
        report.add_row(f"save, {name}", "MB/s", [size / MB / each for each in values])
    stalls = alternate(stallers(state, folder), settings.repeats)
    for name, values in stalls.items():
        report.add_row(f"blocked by {name}", "ms", [each * 1e3 for each in values])
    loaded = alternate(loaders(states, folder), settings.repeats)
    for name, values in loaded.items():
        report.add_row(f"restore, {name}", "MB/s", [size / MB / each for each in values])
    for codec in CODECS:
        own = f"datasvc, codec {codec}"
        report.add_ratio(f"speed of saves, {own} / DCP", saved["DCP"], saved[own])
        report.add_ratio(f"speed of restores, {own} / DCP", loaded["DCP"], loaded[own])
    report.add_ratio("blocked, datasvc / torch.save", stalls["datasvc Model.save"], saved["torch.save"])
    report.add_ratio("blocked, datasvc / DCP async_save", stalls["datasvc Model.save"], stalls["DCP async_save"])
    weights = [{"model": each["model"]} for each in states]
    measure_sizes(report, weights, folder / "sizes", what=f"{len(states)} weights")
    measure_sizes(report, states, folder / "sizes", what=f"{len(states)} whole states")
    measure_frozen(report, settings, folder / "frozen")
    return report


def main() -> None:
    """Parse the command line, measure, and show the figures."""
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument(
        "--optimizer", choices=("sgd", "adamw"), default=None, help="default: both, one after another"
    )
    parser.add_argument("--steps", type=int, default=10, help="between checkpoints; default: %(default)s")
    parser.add_argument("--checkpoints", type=int, default=10, help="default: %(default)s")
    settings = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it shall be: one process
    for optimizer in [settings.optimizer] if settings.optimizer else ["sgd", "adamw"]:
        settings.optimizer = optimizer
        with tempfile.TemporaryDirectory(prefix="datasvc-bench-") as folder:
            measure_optimizer(settings, Path(folder)).show(as_json=settings.as_json)


if __name__ == "__main__":
    main()
