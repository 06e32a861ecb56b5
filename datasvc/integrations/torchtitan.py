"""torchtitan: a loader as its `BaseDataLoader`, and its `CheckpointManager` with versions in place of folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Self

from datasvc.api import DataRepository
from datasvc.errors import ConfigError, NotFoundError
from datasvc.extras import explain_missing
from datasvc.loaders import DataRanks, TokenLoader
from datasvc.models import ConsumptionTracker
from datasvc.models.dcp import DcpReader, DcpWriter

with explain_missing("datasvc.integrations.torchtitan"):
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader

__all__ = ["TitanLoader", "TitanVersions", "dataloader_builder"]

# What `CheckpointManager` would do on its own, and versions do otherwise.
_NOT_SUPPORTED: Final = {
    "initial_load_path": "load a version with datasvc.models.dcp before the training",
    "ft_manager": "run without TorchFT",
}


class TitanLoader(BaseDataLoader):
    """The batches of a `TokenLoader` without an end, epoch after epoch: `({"input": tokens}, labels)`.

    The state is a position in the access order, which does not depend on the number of data ranks.

    Args:
        loader: loader with `labels="across"` or `labels="within"`.
    """

    def __init__(self, loader: TokenLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            for batch in self.loader:
                assert batch.labels is not None
                yield {"input": batch.tokens}, batch.labels

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches that were handed over."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a position."""
        self.loader.load_state_dict(state_dict)


def dataloader_builder(split: Any, **options: Any) -> Callable[..., TitanLoader]:
    """Return a function for `build_dataloader_fn` of a `TrainSpec`, whose loaders read a split of token blocks.

    Args:
        split: split of a data set of token blocks, as long as `training.seq_len`.
        **options: arguments of `TokenLoader`, such as `seed=` and `cache=`.
    """

    def build(dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any, **_: Any) -> TitanLoader:  # noqa: ARG001
        size = job_config.training.local_batch_size
        ranks = DataRanks(dp_rank, dp_world_size)
        given: dict[str, Any] = {"labels": "across", **options}
        return TitanLoader(TokenLoader(split, batch_size=size, training=True, ranks=ranks, **given))

    return build


class TitanVersions(CheckpointManager):
    """Saves and loads what torchtitan's `CheckpointManager` does, each rank its shards, as versions of a model.

        trainer = Trainer(job_config)
        trainer.checkpointer = TitanVersions.of(trainer, repo, "llama")
        trainer.train()

    A version may be loaded by another number of ranks, and with `TitanLoader` has the consumed samples. It is always
    complete and committed when `save` returns: `async_mode`, `keep_latest_k` and `last_save_model_weights_only` have
    no effect; `datasvc models retain` removes versions.

    Args:
        repo: repository of the versions.
        name: name of the model.
        **parts: arguments of `CheckpointManager`, of which `job_config.checkpoint` says whether and when to save.

    Attributes:
        version: newest version that this run committed or loaded; None: none yet.

    Raises:
        ConfigError: the configuration asks for what versions do not do.
    """

    def __init__(self, repo: DataRepository, name: str, **parts: Any) -> None:
        checkpoint = parts["job_config"].checkpoint
        given = {"initial_load_path": checkpoint.initial_load_path, "ft_manager": parts["ft_manager"].enabled}
        for setting, advice in _NOT_SUPPORTED.items():
            if given[setting]:
                raise ConfigError(f"versions do not support {setting}={given[setting]!r}: {advice}")
        checkpoint.async_mode, checkpoint.keep_latest_k = "disabled", 0  # start none of its processes and threads
        super().__init__(**parts)
        self._repo, self._name = repo, name
        self.version: str | None = None
        self._tracker: ConsumptionTracker | None = None
        self._dataloader = parts["dataloader"]
        self._start_tracking(0)

    @classmethod
    def of(cls, trainer: Any, repo: DataRepository, name: str) -> Self:
        """Return the checkpoints of a `torchtitan.train.Trainer`, to put in the place of its own."""
        return cls(
            repo,
            name,
            dataloader=trainer.dataloader,
            model_parts=trainer.model_parts,
            optimizers=trainer.optimizers,
            lr_schedulers=trainer.lr_schedulers,
            states={"train_state": trainer},
            job_config=trainer.job_config,
            ft_manager=trainer.ft_manager,
        )

    def save(self, curr_step: int, force: bool = False) -> None:
        """Save a version after step 1, every `interval` steps, and if `force`. Every rank calls it."""
        if not self.enable_checkpoint or not (force or curr_step == 1 or curr_step % self.interval == 0):
            return
        with torch.no_grad():
            writer = DcpWriter(
                self._repo.repository.url,
                name=self._name,
                step=curr_step,
                data=[] if self._tracker is None else [self._tracker.use()],
                parent=self.version,
            )
            saved = save(self.states, storage_writer=writer)
        self.version = str(saved.storage_meta.reference).rpartition("#")[2]  # URL#NAME@VERSION

    def load(self, step: int = -1) -> bool:
        """Load the newest version, or the newest of a step; return False if the model has none. Every rank calls it.

        Raises:
            ConfigError: `exclude_from_loading` names no part.
            NotFoundError: no version has this step.
        """
        if not self.enable_checkpoint or self._repo.repository.newest("models", self._name) is None:
            return False
        if unknown := sorted({*self.exclude_from_loading} - self.states.keys()):
            raise ConfigError(f"exclude_from_loading has {unknown[0]!r}; the parts are {', '.join(self.states)}")
        states = {part: state for part, state in self.states.items() if part not in self.exclude_from_loading}
        reader = DcpReader(self._repo.repository.url, ref=self._find(step))
        load(states, storage_reader=reader)
        assert reader.version is not None
        self.version = str(reader.version)
        self._start_tracking(self._repo.repository.entry(reader.version).content["step"])
        return True

    def maybe_wait_for_staging(self) -> None:
        """Do nothing: nothing is staged."""

    def _find(self, step: int) -> str:
        steps = {}
        if step == -1:
            return self._name
        for version in self._repo.models.versions(self._name):
            steps[self._repo.repository.entry(version).content["step"]] = str(version)
        if step not in steps:
            listed = ", ".join(map(str, sorted(steps)))
            raise NotFoundError(
                f"{self._name!r} has no version of step {step}; it has versions of the steps {listed}"
            )
        return steps[step]

    def _start_tracking(self, step: int) -> None:
        if isinstance(self._dataloader, TitanLoader):
            self._tracker = ConsumptionTracker(self._dataloader.loader, step=step)
