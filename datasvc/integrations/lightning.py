"""Lightning: a data module over loaders of datasvc, and a callback whose checkpoints are versions of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from datasvc.api import DataRepository
from datasvc.errors import ConfigError
from datasvc.extras import explain_missing
from datasvc.integrations.run_checkpoints import RANK_STATE, RunCheckpoints, is_reference
from datasvc.loaders import DataRanks
from datasvc.models.versions.metadata import state_forms, warn_of_left_out

with explain_missing("datasvc.integrations.lightning"):
    import lightning
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

__all__ = ["SplitsModule", "VersionCallback"]

# The path that `VersionCallback` gives to `Trainer.save_checkpoint`; no file is written to it.
_VERSION_PATH: Final = "datasvc-version"
_SHARDED: Final = (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)


class SplitsModule(lightning.LightningDataModule):
    """A data module over the splits of a data-set version, with any loader of datasvc.

    Lightning stores the state of the training loader in every checkpoint, also in files, so that a resumed `fit`
    continues after the last batch that it trained on. Give the trainer `use_distributed_sampler=False`.

    Args:
        dataset: version of a data set, as `repo.dataset("digits@1")` returns it, or splits by name.
        make_loader: makes a loader: `make_loader(split, training=True, ranks=DataRanks(0, 1))`, such as
            `functools.partial(ImageLoader, batch_size=64)`.
        train: name of the split to train on; `val` and `test` are those to validate and test on, if any.
    """

    def __init__(
        self,
        dataset: Mapping[str, Any],
        make_loader: Callable[..., Any],
        *,
        train: str = "train",
        val: str | None = None,
        test: str | None = None,
    ) -> None:
        super().__init__()
        self._dataset, self._make_loader = dataset, make_loader
        self._names = {"train": train, "val": val, "test": test}
        self._loaders: dict[str, Any] = {}  # by purpose

    def train_dataloader(self) -> Any:
        """Return the loader of the training split, in the trainer's epoch; Lightning loads a checkpoint's state."""
        loader = self._open("train")
        if self.trainer is not None and self.trainer.current_epoch:
            loader.load_state_dict(loader.state_dict() | {"epoch": self.trainer.current_epoch})
        return loader

    def val_dataloader(self) -> Any:
        """Return the loader of the validation split, in the order of the shard table; [] without one."""
        return self._open("val")

    def test_dataloader(self) -> Any:
        """Return the loader of the test split, in the order of the shard table; [] without one."""
        return self._open("test")

    def teardown(self, stage: str) -> None:  # noqa: ARG002 - the signature is Lightning's
        """Release what the loaders hold. They keep their positions."""
        for loader in self._loaders.values():
            loader.close()

    def _open(self, purpose: str) -> Any:
        name = self._names[purpose]
        if name is None:
            return []
        trainer = self.trainer
        ranks = None if trainer is None else DataRanks(trainer.global_rank, trainer.world_size)
        if purpose in self._loaders:
            self._loaders[purpose].close()
        self._loaders[purpose] = self._make_loader(self._dataset[name], training=purpose == "train", ranks=ranks)
        return self._loaders[purpose]


class VersionCallback(lightning.Callback):
    """Saves what a checkpoint of Lightning has, and the random states of every rank, while the training goes on.

    `trainer.fit(..., ckpt_path="net@3")` restores a version, every byte verified. Files that Lightning writes itself
    stay files. A signal ends the fit after the step, with a last commit, if `grace` is set.

    Args:
        **options: see `RunCheckpoints`.

    Attributes:
        checkpoints: the versions of the run: `version`, `newest()`, `stop_signal`.
    """

    def __init__(self, repo: DataRepository, name: str, **options: Any) -> None:
        self.checkpoints = RunCheckpoints(repo, name, **options)
        self._random: Any = None  # random states of a version, until the training starts
        self._captured: dict[str, Any] = {}  # what Lightning collects for the checkpoint in progress
        self._step, self._first_step = -1, -1  # newest step, and the one at which this fit began
        self._is_save_open = False  # whether a save waits for the end of the epoch

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 - the signature is Lightning's
        """Have the trainer read references of versions as checkpoints. Raises ConfigError: it shards the model."""
        strategy = trainer.strategy
        if isinstance(strategy, _SHARDED):
            raise ConfigError(
                f"{type(strategy).__name__} shards the model, and VersionCallback saves models that every rank has "
                "as a whole; save with datasvc.models.dcp, or use the strategy 'ddp'"
            )
        if not isinstance(strategy.checkpoint_io, VersionIO):
            strategy.checkpoint_io = VersionIO(strategy.checkpoint_io, self.checkpoints)
        # Last, so that a version has what other callbacks, such as averages of weights, do after a batch.
        others = [each for each in trainer.callbacks if each is not self and not isinstance(each, _EpochStart)]
        trainer.callbacks = [_EpochStart(self), *others, self]

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Keep the random states until the training starts."""
        self._random = checkpoint.get(RANK_STATE)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Take the checkpoint that Lightning collects on this rank."""
        self._captured = checkpoint

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the model. By now the ranks have met, and Lightning has taken the signals that `grace` takes over."""
        loader, self._step = trainer.train_dataloader, trainer.global_step
        self._first_step, self._is_save_open = self._step, False
        parent = trainer.ckpt_path if is_reference(trainer.ckpt_path) else None
        self.checkpoints.begin(loader, step=self._step, parent=parent)
        warn_of_left_out(_store_hyperparameters({"hyper_parameters": dict(pl_module.hparams)}))
        self.checkpoints.reinstate(self._random, trainer.global_rank, trainer.world_size)
        self._random = None

    def on_train_batch_end(self, trainer: Any, *args: Any, **more: Any) -> None:  # noqa: ARG002
        """Save if it is time; end the training after a signal."""
        if trainer.global_step == self._step:
            return  # the batch only added to the gradients of a step
        self._step = trainer.global_step
        is_due, is_stopping = self.checkpoints.is_due(self._step), self.checkpoints.stop_signal is not None
        # The validation of an epoch, and schedules that step by it, follow its last batch, and a run that continues
        # a version from before them would leave them out. After a signal, save before and after: time may run out.
        self._is_save_open = is_due and bool(trainer.is_last_batch)
        if is_due and (is_stopping or not self._is_save_open):
            self._save(trainer)
        if is_stopping:
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Have schedules step by the metrics of an epoch that continued a version, too."""
        if self._step > self._first_step:
            # Lightning would leave them out, as if no batch of the epoch had been trained since the restart.
            trainer.fit_loop._restarting = False  # noqa: SLF001 - its setter sets True if there is a maximum of steps

    def save_epoch(self, trainer: Any) -> None:
        """Save the state at the end of the last epoch, if that was due, before anything of the next one begins."""
        if not self._is_save_open:
            return
        # The state of a training that ended here: Lightning would leave out an epoch that it finds begun.
        progress = trainer.fit_loop.epoch_progress
        for part in (progress.total, progress.current):
            part.ready -= 1
        self._save(trainer)
        progress.increment_ready()
        self._is_save_open = False

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Save the last state, and wait until everything is committed."""
        self._save(trainer)
        self.checkpoints.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Wait for the saves in progress."""
        self.checkpoints.close(exception)

    def _stop(self, trainer: Any) -> None:
        """End the fit after this step, because a signal ends the program."""
        trainer.should_stop = True
        # Lightning would go on to the minimum, and validate before it ends: both may take longer than `grace`. At the
        # end of an epoch it validates as ever, because schedules may use the result.
        trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = 0
        if not trainer.is_last_batch:
            trainer.limit_val_batches = 0

    def _save(self, trainer: Any) -> None:
        # Lightning passes a checkpoint to `CheckpointIO` on rank 0 only, and to callbacks on every rank; after the
        # call it is complete, because other callbacks and the module add to the same dict.
        trainer.save_checkpoint(_VERSION_PATH, weights_only=False)
        captured, self._captured = self._captured, {}
        _store_hyperparameters(captured)
        metrics, again = trainer.callback_metrics, self._is_save_open
        self.checkpoints.save(captured, step=trainer.global_step, metrics=metrics, again=again)


def _store_hyperparameters(checkpoint: dict[str, Any]) -> dict[str, str]:
    left_out: dict[str, str] = {}
    for key in [key for key in checkpoint if key.endswith("hyper_parameters")]:  # of the module, of the data module
        checkpoint[key] = state_forms(checkpoint[key], key, left_out)
    return left_out


class _EpochStart(lightning.Callback):
    """Calls `save_epoch` before the hooks of all other callbacks."""

    def __init__(self, versions: VersionCallback) -> None:
        self._versions = versions

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        self._versions.save_epoch(trainer)


class VersionIO(CheckpointIO):
    """Reads versions as checkpoints, as `checkpoints` does, and passes files to `files`."""

    def __init__(self, files: CheckpointIO, checkpoints: RunCheckpoints) -> None:
        self._files, self._checkpoints = files, checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a file; nothing for a checkpoint that `VersionCallback` saves."""
        if path != _VERSION_PATH:
            self._files.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *options: Any, **more: Any) -> dict[str, Any]:
        """Return the state of a version, or of a file."""
        if is_reference(path):
            return self._checkpoints.read(str(path))
        state: dict[str, Any] = self._files.load_checkpoint(path, *options, **more)
        return state

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file."""
        self._files.remove_checkpoint(path)

    def teardown(self) -> None:
        """End the `CheckpointIO` of the files."""
        self._files.teardown()
