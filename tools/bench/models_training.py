"""What `models.py` measures on: a ResNet-50 that learns digits, and its checkpoints as files of torch.save.

python -P tools/bench/models_training.py FOLDER OPTIMIZER [--checkpoints 10] [--steps 10] [--frozen] [--model NAME]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits

from datasvc.trainer.recipes.models import build_model

BATCH, SIDE, CLASSES = 8, 32, 1000


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

    def step(self) -> None:
        """Take one step."""
        chosen = torch.randint(len(self._labels), (BATCH,))
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(self._images[chosen]), self._labels[chosen]).backward()
        self.optimizer.step()


def main() -> None:
    """Train, and write `FOLDER/0.pt` and so on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("optimizer", choices=("sgd", "adamw"))
    parser.add_argument("--checkpoints", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="before each checkpoint")
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--model", default="resnet50")
    settings = parser.parse_args()
    training = Training(settings.optimizer, frozen=settings.frozen, model=settings.model)
    console = Console(stderr=True)
    numbers = track(range(settings.checkpoints), "training", console=console, disable=not console.is_terminal)
    for number in numbers:
        for _ in range(settings.steps):
            training.step()
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        torch.save(state, settings.folder / f"{number}.pt")


if __name__ == "__main__":
    main()
