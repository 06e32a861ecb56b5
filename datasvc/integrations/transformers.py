"""Hugging Face transformers: a callback of `Trainer` whose checkpoints are versions, and data sets in our order."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from datasvc.api import DataRepository
from datasvc.errors import ConfigError
from datasvc.extras import explain_missing
from datasvc.integrations.run_checkpoints import LOADER, RANK_STATE, RunCheckpoints
from datasvc.loaders import DataRanks
from datasvc.loaders.torch import Dataset, OrderBatchSampler

with explain_missing("datasvc.integrations.transformers"):
    import torch
    import transformers

__all__ = ["OrderedTrainer", "VersionsOfTrainer"]


class OrderedTrainer(transformers.Trainer):
    """A `Trainer` that reads a `datasvc.loaders.torch.Dataset` in the access order of datasvc.

    The order is a function of `args.data_seed` (or `args.seed`) and the epoch; each rank reads its part. A resumed
    run computes the order from its step, and reads no sample that it skips. Other data sets are read as by `Trainer`.
    The last samples of an epoch that do not fill a batch of every rank are left out.
    """

    def get_train_dataloader(self) -> Any:
        """Return the loader of the training data."""
        dataset, args = self.train_dataset, self.args
        if not isinstance(dataset, Dataset):
            return super().get_train_dataloader()
        batches = OrderBatchSampler(
            dataset,
            batch_size=self._train_batch_size,  # smaller than that of `args` if it is searched for
            seed=args.seed if args.data_seed is None else args.data_seed,
            ranks=DataRanks(args.process_index, args.world_size),
        )
        return _OrderedLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )


class VersionsOfTrainer(transformers.TrainerCallback):
    """Saves the state of a `Trainer` as versions of a model, in the background.

        versions = VersionsOfTrainer(repo, "net", every="10min", grace="30s")
        trainer = OrderedTrainer(model, args, train_dataset=dataset, callbacks=[versions])
        trainer.train(resume_from_checkpoint=versions.fetch(args, "/tmp/net"))

    A version has the weights, the optimizer, the schedule, the state of the trainer and the random states of each
    rank; with `OrderedTrainer` also the consumed samples. `args.save_strategy` of the trainer may be "no".

    Args:
        **options: see `RunCheckpoints`.

    Attributes:
        checkpoints: the versions of the run: `version`, `newest()`, `stop_signal`.
    """

    def __init__(self, repo: DataRepository, name: str, **options: Any) -> None:
        self.checkpoints = RunCheckpoints(repo, name, **options)
        self._fetched: tuple[str, Any] | None = None  # version and loader state of `fetch`

    def fetch(self, args: Any, folder: str | Path, ref: str | None = None) -> str | None:
        """Write a version as a checkpoint folder of `Trainer`, and return it; None if the model has no version.

        Every rank calls this. The first rank of each node writes, each byte is verified.

        Args:
            args: training arguments of the run.
            folder: folder on a disk of the node; files of an earlier `fetch` in it are removed.
            ref: a version or tag of any model; None: the newest version of this model.

        Raises:
            ConfigError: the folder has other files, of which `Trainer` would read some in place of the version's.
        """
        found = self.checkpoints.open().restore(ref, default=None)
        if found is None:
            return None
        state, path = found.state, Path(folder)
        with args.main_process_first(local=True, desc="write the checkpoint folder"):
            if args.local_process_index == 0:
                write_folder(path, state)
        self._fetched = str(found.version), state.get(LOADER)
        return str(path)

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:  # noqa: ARG002
        """Start to record the consumed samples.

        Raises:
            ConfigError: the model is sharded; or the run continues with another batch size or number of ranks, after
                which the step does not tell which samples were read.
        """
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise ConfigError(
                "FSDP and DeepSpeed shard the model, and VersionsOfTrainer saves models that every rank has as a "
                "whole; save with datasvc.models.dcp"
            )
        loader, position = parts["train_dataloader"], None
        if isinstance(loader, _OrderedLoader):
            position = _StepPosition(loader.batch_sampler, state, args.gradient_accumulation_steps)
        version, saved = self._fetched or (None, None)
        if position is not None and saved is not None and state.global_step and saved != position.state_dict():
            raise ConfigError(
                f"{version} was saved at {saved}, and step {state.global_step} of this run is "
                f"{position.state_dict()}; give the data, the seed, the batch size, the gradient accumulation and "
                "the number of ranks that it was saved with"
            )
        self.checkpoints.begin(position, step=state.global_step, parent=version if state.global_step else None)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> Any:  # noqa: ARG002
        """Save if it is time; end the training after a signal."""
        if self.checkpoints.is_due(state.global_step):
            self._save(state, parts)
        if self.checkpoints.stop_signal is not None:
            control.should_training_stop = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:  # noqa: ARG002
        """Save the last state, and wait until everything is committed."""
        self._save(state, parts)
        self.checkpoints.close()

    def _save(self, state: Any, parts: dict[str, Any]) -> None:
        content = {part: parts[part].state_dict() for part in ("model", "optimizer", "lr_scheduler")}
        scaler = getattr(parts["optimizer"], "scaler", None)
        if scaler is not None:
            content["scaler"] = scaler.state_dict()
        content[TRAINER_STATE] = json.dumps(dataclasses.asdict(state))
        # `Trainer` logs the loss, and then an evaluation, in entries of their own: the newest of each counts.
        newest = {name: value for logs in state.log_history for name, value in logs.items()}
        metrics = {
            name: value
            for name, value in newest.items()
            if name == "loss" or (name.startswith("eval_") and not name.endswith(("_runtime", "_per_second")))
            if isinstance(value, int | float) and not isinstance(value, bool)  # `compute_metrics` may return lists
        }
        self.checkpoints.save(content, step=state.global_step, metrics=metrics or None)


class _OrderedLoader(torch.utils.data.DataLoader[Any]):
    """A loader that `Trainer` sets to an epoch."""

    batch_sampler: OrderBatchSampler

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)


class _StepPosition:
    """The position of a run, which `Trainer` determines by the step; a `ReadLoader`.

    `Trainer` replaces the loader of a resumed epoch, so the batches handed over are not counted by one object.
    """

    def __init__(self, batches: OrderBatchSampler, state: Any, accumulation: int) -> None:
        self._batches, self._state, self._accumulation = batches, state, accumulation
        order = batches.order
        # A step takes several batches with gradient accumulation. Positions count batches, so that the samples of an
        # incomplete last step of an epoch count too.
        self.split, self.batch_size, self.tail, self.ranks = order.split, order.batch_size, order.tail, order.ranks

    def state_dict(self) -> dict[str, Any]:
        num_batches = len(self._batches)
        epoch, step = divmod(self._state.global_step, -(-num_batches // self._accumulation))
        order = self._batches.order
        return order.state_at(epoch, min(step * self._accumulation, num_batches) * order.global_batch)


with explain_missing("datasvc.integrations.transformers"):
    import torch
    from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
    from transformers.utils import WEIGHTS_NAME

# The parts of a version, and the file of the folder that `Trainer` reads each of them from.
_FILES: Final = {
    "model": WEIGHTS_NAME,
    "optimizer": OPTIMIZER_NAME,
    "lr_scheduler": SCHEDULER_NAME,
    "scaler": SCALER_NAME,
}
_RANDOM_FILE: Final = re.compile(r"rng_state(_[0-9]+)?\.pth")
TRAINER_STATE: Final = "trainer_state"


def write_folder(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the state of a version as a checkpoint folder, in place of an earlier one.

    Raises:
        ConfigError: the folder has other files, some of which `Trainer` would read in place of the version's.
    """
    _clear(folder)
    for part, file in _FILES.items():
        if part in state:
            torch.save(state[part], folder / file)
    (folder / TRAINER_STATE_NAME).write_text(state[TRAINER_STATE], encoding="utf-8")
    for rank, random_state in enumerate(state[RANK_STATE]):
        torch.save(_for_trainer(random_state), folder / f"rng_state_{rank}.pth")
    torch.save(_for_trainer(state[RANK_STATE][0]), folder / "rng_state.pth")  # of a job of one rank


def _clear(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    paths, own = sorted(folder.iterdir()), {*_FILES.values(), TRAINER_STATE_NAME}
    others = [path.name for path in paths if path.name not in own and not _RANDOM_FILE.fullmatch(path.name)]
    if others:
        raise ConfigError(
            f"{folder} has files that fetch did not write: {', '.join(others[:5])}; give another folder"
        )
    for path in paths:
        path.unlink()


def _for_trainer(state: Any) -> dict[str, Any]:
    """Return random states of datasvc as `Trainer` reads them from a file."""
    kind, keys, *rest = state["numpy"]
    found = {"python": state["python"], "numpy": (kind, np.asarray(keys, np.uint32), *rest), "cpu": state["torch"]}
    return found | ({"cuda": state["cuda"]} if "cuda" in state else {})
