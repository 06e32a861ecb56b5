"""The states that `models.py` saves and restores: real ones, of a training in a process of its own."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from report import ROOT

from datasvc.models import CodeRevision
from datasvc.models.tensors.state_tree import flatten, unflatten

MB: Final = 1e6
NO_CODE: Final = CodeRevision(None, dirty=False)

State = Mapping[str, Any]


def run_apart(program: str, *arguments: str) -> str:
    """Run a program of this folder that imports the trainer; returns what it prints."""
    # -P: the benchmark of the trainer, which lies here, has its name.
    command = [sys.executable, "-P", str(Path(__file__).with_name(program)), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


def train(
    folder: Path, optimizer: str, *, model: str, checkpoints: int, steps: int, frozen: bool = False
) -> list[State]:
    """Return the states of a training, mapped from files in `folder`, which is made.

    Args:
        folder: new.
        optimizer: "sgd" or "adamw".
        model: by its name in the trainer's recipes.
        checkpoints: as many.
        steps: before each.
        frozen: only the last layer learns.
    """
    folder.mkdir()
    counts = ["--checkpoints", str(checkpoints), "--steps", str(steps), "--model", model]
    run_apart("models_training.py", str(folder), optimizer, *counts, *(["--frozen"] if frozen else []))
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


def warm_memory(nbytes: int) -> None:
    """Touch memory and give it back, so that what comes next does not pay for memory that nobody had lately.

    A virtual machine may hand free memory to its host, which gives it again by the page: at 0.4 GB/s where this was
    seen, several times slower than what is measured.
    """
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for start in range(0, nbytes, mmap.PAGESIZE):
            memory[start] = 1


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
