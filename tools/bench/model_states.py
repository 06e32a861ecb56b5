"""The states that `models` saves and restores: real ones, of a ResNet-50 that learns digits in another process."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits

from datasvc.models import CodeRevision
from datasvc.models.tensors.state_tree import flatten, unflatten
from datasvc.trainer.recipes.models import build_model
from tools.bench.runner import call_apart

MB: Final = 1e6
NO_CODE: Final = CodeRevision(None, dirty=False)
BATCH, SIDE, CLASSES = 8, 32, 1000

State = Mapping[str, Any]


class Training:
    """A ResNet-50 that learns digits.

    Args:
        optimizer: "sgd" (Goyal et al.: 0.1 per 256 samples, momentum 0.9, decay 1e-4) or "adamw" (1e-3, decay 0.05).
        frozen: only the last layer learns.
        model: by its name in the trainer's recipes.
    """

    def __init__(self, optimizer: str, *, frozen: bool, model: str = "resnet50") -> None:
        torch.manual_seed(0)
        digits = load_digits()
        images = torch.from_numpy(digits.images).float()[:, None] / 16
        self._images = torch.nn.functional.interpolate(images, SIDE).expand(-1, 3, -1, -1)
        self._labels = torch.from_numpy(digits.target)
        self.model = build_model(model, CLASSES)
        learning = list(self.model.parameters())
        if frozen:
            self.model.eval()  # running statistics are frozen too
            for parameter in learning[:-2]:
                parameter.requires_grad = False
            learning = learning[-2:]
        if optimizer == "sgd":
            sgd = torch.optim.SGD(learning, lr=0.1 * BATCH / 256, momentum=0.9, weight_decay=1e-4)
            self.optimizer: torch.optim.Optimizer = sgd
        else:
            self.optimizer = torch.optim.AdamW(learning, lr=1e-3, weight_decay=0.05)

    def state(self) -> State:
        """Return the state of the model and the optimizer."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def step(self) -> None:
        """Take one step."""
        chosen = torch.randint(len(self._labels), (BATCH,))
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(self._images[chosen]), self._labels[chosen]).backward()
        self.optimizer.step()


def write_states(folder: str, optimizer: str, model: str, num_states: int, steps: int, frozen: bool) -> None:
    """Train, and write `FOLDER/0.pt` and so on, each after so many steps."""
    training = Training(optimizer, frozen=frozen, model=model)
    console = Console(stderr=True)
    for number in track(range(num_states), "training", console=console, disable=not console.is_terminal):
        for _ in range(steps):
            training.step()
        torch.save(training.state(), f"{folder}/{number}.pt")


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
    call_apart(write_states, folder, optimizer, model, checkpoints, steps, frozen)
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
    """Touch memory and give it back, so that what comes next does not pay for memory that was not used lately.

    A virtual machine may hand free memory to its host, which gives it again by the page: at 0.4 GB/s where this was
    seen, several times slower than what is measured.
    """
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for start in range(0, nbytes, mmap.PAGESIZE):
            memory[start] = 1
