"""Training with Lightning, checkpoints as versions of a model: killed and started again it ends with the same bits.

    python examples/lightning_checkpoints.py --repo REPO --data digits@1

On one device or with DDP. The versions tell which samples they consumed.
"""

import argparse
import logging
import sys
from functools import partial
from typing import Any

import lightning
import torch
from torch import nn

import datasvc
from datasvc.integrations.lightning import SplitsModule, VersionCallback
from datasvc.loaders import ImageLoader


class SmallNet(lightning.LightningModule):
    """Something to train: it draws random numbers, and its rate depends on the step."""

    def __init__(self, num_classes: int, size: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Flatten()),
            nn.Linear(8 * (size // 2) ** 2, num_classes),
        )

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, batch_size=len(labels))
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        """Return the optimizer and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    """Train; continue from the newest version where there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--name", default="lightning")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--every", default="10min", help='a time, "10min", or a number of steps')
    args = parser.parse_args()

    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("datasvc.integrations").setLevel(logging.INFO)  # a line for each save
    lightning.seed_everything(0)
    repo = datasvc.open(args.repo)
    dataset = repo.dataset(args.data)
    every = int(args.every) if args.every.isdecimal() else args.every
    versions = VersionCallback(repo, args.name, every=every, grace="30s", config=vars(args))
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        callbacks=[versions],
        use_distributed_sampler=False,  # the loader divides the samples among the ranks
        enable_checkpointing=False,
        logger=False,
    )
    data = SplitsModule(dataset, partial(ImageLoader, batch_size=args.batch_size, size=args.size))
    trainer.fit(SmallNet(len(dataset["train"].classes), args.size), data, ckpt_path=versions.checkpoints.newest())
    if versions.checkpoints.stop_signal is not None:
        sys.exit(128 + versions.checkpoints.stop_signal)


if __name__ == "__main__":
    main()
