"""Training with Lightning, checkpoints as versions of a model: killed and started again it ends with the same bits.

    python examples/lightning_checkpoints.py --repo REPO --data digits@1

The first three classes are for any LightningModule, on one device or with DDP: copy them. The second and third take
any loader: one of datasvc goes on at its sample, and its versions tell which samples they consumed.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import nn

import datasvc
from datasvc.api import DataRepository
from datasvc.loaders import DataRanks, ImageLoader
from datasvc.models import CheckpointManager, ConsumptionTracker, ReadLoader
from datasvc.trainer.recipes.random_state import capture, reinstate


class TupleLoader(ImageLoader):
    """Hands Lightning tuples, which it can move."""

    def __iter__(self) -> Iterator[Any]:
        """Yield `(images, labels)` of the rest of the epoch."""
        return map(tuple, super().__iter__())


class VersionPlugin(TorchCheckpointIO):
    """Lets `trainer.fit(ckpt_path="NAME@3")` restore a version; all else that Lightning saves stays as it was.

    Args:
        repo: has the versions.
    """

    def __init__(self, repo: DataRepository) -> None:
        super().__init__()
        self._repo = repo

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        """Return the state of a version, every byte verified."""
        return self._repo.models.restore(str(path)).state


class SaveVersions(lightning.Callback):
    """Saves what Lightning keeps in a checkpoint, and the random states of every rank, while the training goes on.

    Args:
        repo: where to.
        name: of the model.
        **options: of `repo.models.manager`, such as `every="10min"`, `max_stall="3%"`, `grace="30s"`.

    Attributes:
        stop_signal: the signal that ended the training early; None: none did.
    """

    def __init__(self, repo: DataRepository, name: str, **options: Any) -> None:
        self._repo, self._name, self._options = repo, name, options
        self._random: dict[str, Any] | None = None
        self._place: dict[str, Any] | None = None
        self._model: CheckpointManager | None = None
        self.stop_signal: int | None = None

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Take the loader's place, and this rank's random states where there are as many ranks as there were."""
        self._place, states = checkpoint.get("loader"), checkpoint.get("rank_state", ())
        self._random = states[trainer.global_rank] if len(states) == trainer.world_size else None

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Open the model: by now the ranks have met, and Lightning has taken the signals that `grace` takes over."""
        self._model = self._repo.models.manager(self._name, **self._options)
        loader, self._reading = trainer.train_dataloader, None
        if isinstance(loader, ReadLoader):  # any other does not tell which samples it has served
            if self._place is not None:
                loader.load_state_dict(self._place)  # Lightning forgets it at the end of a fit
            self._reading = ConsumptionTracker(loader, step=trainer.global_step)
        self._parent, self._step = trainer.ckpt_path, trainer.global_step
        self._saved_step = -1
        if self._random is not None:
            reinstate(self._random)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Save if it is time to; end the training after a signal."""
        if trainer.global_step == self._step:
            return  # the batch only added to the gradients of a step
        self._step = trainer.global_step
        if self._model.should_save(self._step):
            self._save(trainer)
        self.stop_signal = self._model.stop_signal
        trainer.should_stop = trainer.should_stop or self.stop_signal is not None

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """Save the last state, and wait until everything is committed."""
        if self._saved_step != trainer.global_step:
            self._save(trainer)
        self._model.close()

    def on_exception(self, *_: Any) -> None:
        """Wait for what is under way."""
        if self._model is not None:  # it may have failed before the training began
            self._model.close()

    def _save(self, trainer: Any) -> None:
        # On every rank: `trainer.save_checkpoint` makes the same on all of them, but has rank 0 alone save it.
        state = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)  # noqa: SLF001
        if self._reading is not None:
            state["loader"] = trainer.train_dataloader.state_dict()
        self._model.save(
            state,
            rank_state=capture(),
            step=self._step,
            data=[] if self._reading is None else [self._reading.use()],
            metrics={name: value.item() for name, value in trainer.callback_metrics.items()},
            parent=self._parent,
        )
        self._saved_step, self._parent = self._step, None  # from here on each version continues the one before
        if trainer.is_global_zero:
            print(f"step {self._step}: newest version {self._model.version}", flush=True)


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

    lightning.seed_everything(0)
    repo = datasvc.open(args.repo)
    split = repo.dataset(args.data)["train"]
    every = int(args.every) if args.every.isdecimal() else args.every
    versions = SaveVersions(repo, args.name, every=every, grace="30s")
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        callbacks=[versions],
        plugins=[VersionPlugin(repo)],
        use_distributed_sampler=False,  # the loader knows its ranks
        enable_checkpointing=False,
        logger=False,
    )
    loader = TupleLoader(
        split,
        batch_size=args.batch_size,
        training=True,
        size=args.size,
        ranks=DataRanks(trainer.global_rank, trainer.world_size),
    )
    found = repo.models.versions(args.name)
    newest = str(found[-1]) if found else None
    trainer.fit(SmallNet(len(split.classes), args.size), loader, ckpt_path=newest)
    if versions.stop_signal is not None:
        sys.exit(128 + versions.stop_signal)


if __name__ == "__main__":
    main()
