"""A StorageWriter whose checkpoints are model versions."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from datasvc.errors import ConfigError
from datasvc.models.dcp.checkpoint_id import CheckpointId, is_checkpoint_id
from datasvc.models.dcp.failures import errors_that_travel
from datasvc.models.dcp.metadata import encode_sharding
from datasvc.models.dcp.saving import join_shares, sizes_by_name, store_share
from datasvc.models.saving.shared_store import Marker, check_markers, write_marker
from datasvc.models.tensors.tensor_table import TensorRecord
from datasvc.models.tensors.write import CODECS, Codec
from datasvc.models.versions.code_revision import CodeRevision
from datasvc.models.versions.commit import base_records, commit
from datasvc.models.versions.data_use import DataUse
from datasvc.models.versions.metadata import VersionMetadata
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.references import check_name

DEFAULT_NAME: Final = "checkpoint"


class DcpWriter(StorageWriter):
    """Saves what torch.distributed.checkpoint gives it as the next version of a model. Make one on every rank.

    Args:
        path: a repository, local folder or any fsspec URL; made where there is none.
        name: of the model, made when new.
        codec: "none", "planes" or "delta"; as of `store_chunks`.
        step: as of `datasvc.models.save`, like what follows; that of the coordinator counts.
        data: see there.
        config: see there.
        metrics: see there.
        parent: see there.
        message: see there.
        code: see there.
        environment: see there.

    Attributes:
        save_id: of this save, on this rank.
        committed: the version that the last save made, on the coordinator. Every rank finds it in what
            `dcp.save` returns: `metadata.storage_meta.checkpoint_id`, which `DcpReader` takes.

    Raises:
        ConfigError: no model can have that name, or there is no such codec.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = DEFAULT_NAME,
        codec: Codec = "delta",
        step: int = 0,
        data: Sequence[DataUse] = (),
        config: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        parent: str | None = None,
        message: str = "",
        code: CodeRevision | None = None,
        environment: Mapping[str, Any] | None = None,
    ) -> None:
        if codec not in CODECS:
            raise ConfigError(f"no codec {codec!r}; there are {', '.join(CODECS)}")
        self.url = os.fspath(path)
        self.name = check_name(name, "model")
        self.codec: Codec = codec
        self.about = VersionMetadata(
            step, data, config, metrics, parent, message=message, code=code, environment=environment
        )
        self.save_id = str(uuid.uuid4())
        self.committed: Resolved | None = None
        self._given_id: str | os.PathLike[str] = path
        self._repository: Repository | None = None
        self._base: Sequence[TensorRecord] = ()
        self._is_coordinator = False

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where this saves to, as it was said last."""
        return self._given_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `reset` takes it."""
        return is_checkpoint_id(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save. `checkpoint_id`: NAME, a repository's URL (anything with a slash), or URL#NAME.

        Raises:
            ConfigError: it is none of these, or names a version: a save makes a new one.
        """
        if checkpoint_id:
            wanted = CheckpointId.parse(checkpoint_id)
            if wanted.ref and "@" in wanted.ref:
                raise ConfigError(f"a save makes a new version, it cannot write {wanted.ref!r}; give the name alone")
            self.url = wanted.url or self.url
            self.name = wanted.ref or self.name
            self._given_id = checkpoint_id
        self.save_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta:
        """Return which save this is, for planners."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Open the repository and read what differences are made to. Every rank of a save calls this.

        Raises:
            ConfigError: ranks would not be joined to one version.
            UnavailableError: the store did not answer.
        """
        if not kwargs.get("use_collectives", True) and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError("use_collectives=False would make a version of each rank's part; save without it")
        with errors_that_travel():
            self.committed = None
            self._repository = Repository.create(self.url)
            self._is_coordinator = is_coordinator
            # Each rank looks for itself. Should they find different versions no harm is done: a table is complete.
            needs_base = self.codec == "delta"
            self._base = base_records(self._repository, self.name, self.about.parent) if needs_base else ()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan with the marker that this rank has left: where chunks lie follows from their bytes.

        Raises:
            UnavailableError: the store did not answer.
        """
        assert self._repository is not None, "torch sets a writer up before it plans"
        if self._is_coordinator:
            return plan
        with errors_that_travel():
            return replace(plan, storage_data=write_marker(self._repository.storage))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are, once it is certain that all ranks store to one place.

        Before any of them stores a tensor. A planner that hands no marker on is not checked here: the commit looks
        whether all objects are there.

        Raises:
            ConfigError: ranks store elsewhere; names them.
            UnavailableError: the store did not answer.
        """
        assert self._repository is not None, "torch sets a writer up before it plans"
        markers = [plan.storage_data if isinstance(plan.storage_data, Marker) else None for plan in plans]
        with errors_that_travel():
            check_markers(self._repository.storage, markers)
        return [replace(plan, storage_data=None) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Store this rank's share. Nothing of it is visible before `finish`.

        Raises:
            ConfigError: a tensor or value cannot be stored; names it.
            UnavailableError: the store failed.
        """
        assert self._repository is not None, "torch sets a writer up before it writes"
        with errors_that_travel():
            share = store_share(self._repository, plan, planner, self._base, self.codec)
        sizes = sizes_by_name(share)
        results = [WriteResult(item.index, sizes.pop(item.index.fqn, 0), share) for item in plan.items]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Join what all ranks stored and commit it as one version. The coordinator calls this.

        Raises:
            ConfigError: the ranks' parts do not make up the tensors.
            ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`.
        """
        assert self._repository is not None, "torch sets a writer up before it finishes"
        with errors_that_travel():
            shares = [part[0].storage_data for part in results if part]
            opaque = frozenset().union(*(share.opaque for share in shares))
            sharding = self._repository.objects.put(encode_sharding(metadata, opaque, self.save_id))
            self.committed = commit(
                self._repository,
                self.name,
                join_shares(metadata, shares),
                self.about,
                extra={"sharding": sharding.digest},
            )
            # Torch hands the metadata to every rank: so each knows which version it has saved.
            metadata.storage_meta = StorageMeta(f"{self.url}#{self.committed}", self.save_id)

    def __getstate__(self) -> dict[str, Any]:
        # What belongs to one save stays behind when a background process takes over.
        return {**vars(self), "_repository": None, "_base": ()}
