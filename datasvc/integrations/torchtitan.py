"""torchtitan: a loader as its `BaseDataLoader`, and its `CheckpointManager` with versions in place of folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from datasvc.api import DataRepository
from datasvc.errors import ConfigError, NotFoundError
from datasvc.extras import explain_missing
from datasvc.loaders import DataRanks, TokenLoader
from datasvc.models import ConsumptionTracker
from datasvc.models.dcp import DcpReader, DcpWriter
from datasvc.models.registry.retention import RetentionPolicy

with explain_missing("datasvc.integrations.torchtitan"):
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
    from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader

__all__ = ["TitanLoader", "TitanVersions"]


class TitanLoader(BaseDataLoader):
    """The batches of a `TokenLoader` without an end: `({"input": tokens, "positions": positions}, labels)`.

    Positions begin again at each document if the loader has `documents=True`, so that tokens attend within their
    document; otherwise they count through the block. The state is a position in the access order, which does not
    depend on the number of data ranks.

    Args:
        loader: loader with `labels="across"` or `labels="within"`; None: made from `config`, as by torchtitan.
        config: data set and options of the loader.
        runtime: what torchtitan's `Trainer` adds: `dp_rank`, `dp_world_size`, `local_batch_size`, `seq_len`.

    Raises:
        ConfigError: no data set is given, or its blocks are not of `seq_len` tokens.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Blocks of a data set: `dataset="books@1"`, `dataset_path` (a repository), arguments of `TokenLoader`."""

        split: str = "train"
        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, loader: TokenLoader | None = None, *, config: Config | None = None, **runtime: Any) -> None:
        self.loader = self._open(config, **runtime) if loader is None else loader

    @staticmethod
    def _open(
        config: Config | None, *, dp_rank: int, dp_world_size: int, local_batch_size: int, seq_len: int, **_: Any
    ) -> TokenLoader:
        if config is None or not config.dataset or not config.dataset_path:
            raise ConfigError(
                "the data set is missing: TitanLoader.Config(dataset='NAME@VERSION', dataset_path=REPOSITORY)"
            )
        split = DataRepository.open(config.dataset_path).dataset(config.dataset)[config.split]
        given: dict[str, Any] = {"labels": "across", **config.options}
        ranks = DataRanks(dp_rank, dp_world_size)
        loader = TokenLoader(split, batch_size=local_batch_size, training=True, ranks=ranks, **given)
        if seq_len != loader.block_tokens:
            raise ConfigError(
                f"training.seq_len is {seq_len}, but the blocks of {config.dataset} have {loader.block_tokens} "
                "tokens: set it to that, or ingest with --block-tokens"
            )
        return loader

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            for batch in self.loader:
                assert batch.labels is not None
                positions = batch.position_ids
                if positions is None:
                    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(
                        batch.tokens
                    )
                yield {"input": batch.tokens, "positions": positions}, batch.labels

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches that were handed over."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a position."""
        self.loader.load_state_dict(state_dict)


class TitanVersions(CheckpointManager):
    """Saves and loads what torchtitan's `CheckpointManager` does, each rank its shards, as versions of a model.

    Set as `config.checkpoint = TitanVersions.Config(enable=True, repo="repo", name="llama", interval=100)`. All
    settings of `CheckpointManager` apply: with `async_mode` versions are committed in the background, and
    `keep_latest_k` removes older versions that have no tag. While the model has no version, a run starts from
    `initial_load_path`, which may be a version (URL#NAME@3), or from the newest folder of torchtitan's own manager.

    Args:
        config: settings.
        parts: arguments of `CheckpointManager`: `dataloader`, `model_parts`, `optimizers` and others.

    Attributes:
        version: newest version that this run committed or loaded, or None; after an asynchronous save, from the next
            save or `close` on.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The settings of torchtitan's manager. Unlike there, all versions are kept and the last one is complete."""

        repo: str = ""  # URL
        name: str = ""  # of the model
        keep_latest_k: int = 0
        last_save_model_only: bool = False

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            if self.enable and not (self.repo and self.name):
                raise ConfigError(
                    f"set checkpoint.repo, the URL of a repository, and checkpoint.name, that of the model; they are "
                    f"{self.repo!r} and {self.name!r}"
                )

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        self.version: str | None = None
        if not self.enable:
            return
        self._repo, self._name = DataRepository.open(config.repo), config.name
        self._step = 0  # step of the save in progress
        self._tracker: ConsumptionTracker | None = None
        self._dataloader = parts["dataloader"]
        self._start_tracking(0)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self._step = curr_step
        return bool(super()._save(curr_step, last_step))

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save one version, as `CheckpointManager` saves one folder; the result is the same."""
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        writer = DcpWriter(
            self._repo.repository.url,
            name=self._name,
            step=self._step,
            data=[] if self._tracker is None else [self._tracker.use()],
            parent=self.version,
        )
        if async_mode == AsyncMode.DISABLED:
            self._note(save(state_dict, storage_writer=writer))
            return None
        options: dict[str, Any] = {}
        if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            options = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS, "async_stager": self.stager}
        return async_save(state_dict, storage_writer=writer, process_group=self.pg, **options)

    def _wait_for_saving(self) -> None:
        future = self.save_future
        super()._wait_for_saving()
        self._note(future.result())

    def _close(self) -> None:
        # The last version of a run that ends between two saves must be committed, or its error raised.
        try:
            self.maybe_wait_for_saving()
        finally:
            super()._close()

    def _note(self, saved: Any) -> None:
        """Remember the version that a save has committed; `saved` is its `Metadata`, on every rank."""
        self.version = str(saved.storage_meta.reference).rpartition("#")[2]  # URL#NAME@VERSION

    def _load(self, step: int = -1) -> bool:
        """Load the newest version, or the newest of a step; return False if there is nothing to load.

        Raises:
            ConfigError: `exclude_from_loading` names no part.
            NotFoundError: no version has this step.
        """
        if unknown := sorted({*self.exclude_from_loading} - self.states.keys()):
            raise ConfigError(f"exclude_from_loading has {unknown[0]!r}; the parts are {', '.join(self.states)}")
        url = self._repo.repository.url
        if self._repo.repository.newest("models", self._name) is None:
            url, has_version, ref = (self.initial_load_path or "").partition("#")
            if not has_version:
                return bool(super()._load(step))
            model_only = self.initial_load_model_only
        else:
            ref, model_only = self._find(step), step == 0
        states = self._states_to_load(model_only)
        reader = DcpReader(url, ref=ref)
        load(states, storage_reader=reader)
        # `states` has the tensors of the model flat, and torch calls `load_state_dict` of the other parts only.
        self.states[MODEL].load_state_dict(states)
        assert reader.version is not None
        if url == self._repo.repository.url:
            self.version = str(reader.version)
            self._start_tracking(0 if model_only else self._repo.repository.entry(reader.version).content["step"])
        return True

    def _purge_stale_checkpoints(self) -> None:
        """Remove all but the newest `keep_latest_k` versions that are committed by now."""
        if self.keep_latest_k and dist.get_rank() == 0 and self.version is not None:
            self._repo.models.retain(self._name, RetentionPolicy(last=self.keep_latest_k), dry_run=False)

    def _find(self, step: int) -> str:
        if step == -1:
            return self._name
        steps = {}
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
