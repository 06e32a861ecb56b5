"""A StorageReader of model versions."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from datasvc.errors import ConfigError, DatasvcError
from datasvc.models.dcp.checkpoint_id import CheckpointId, is_checkpoint_id
from datasvc.models.dcp.failures import errors_that_travel
from datasvc.models.dcp.loading import ShardedVersion, load_items, read_sharded
from datasvc.models.dcp.writer import DEFAULT_NAME
from datasvc.models.restoring.copies import OpenCache, StoredCopies
from datasvc.models.restoring.report import RestoreReport
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.references import parse_reference

logger = logging.getLogger(__name__)


class DcpReader(StorageReader):
    """Loads model versions through torch.distributed.checkpoint, however they were saved. Make one on every rank.

    Each rank reads the chunks that its plan meets and no others, each byte verified. One that is missing, damaged or
    out of reach comes from the next place that has a good copy; bad copies are in the report, and in the log.

    Args:
        path: a repository, local folder or any fsspec URL.
        name: of the model; its newest version is read.
        ref: which version, "NAME@3" or "NAME@tag", instead of `name`.
        cache: the node's cache, of which the repository and `fallback` are asked for what it lacks; made by
            `datasvc.models.restoring.restore.node_cache`. Each object is fetched whole, once per node.
        fallback: other repositories, or their URLs, that may have copies of objects; asked in this order.
        trusted_keys: files of public keys, as of `datasvc.models.restoring.stored_version.read_version`.
        planner_bytes: hand values that a planner saved in a format of its own to the planner that loads. Only for
            versions of people you trust: what the bytes do there is up to that planner, which may unpickle them.

    Attributes:
        load_id: of this load, on this rank.
        version: which version the last load read.
        report: how that went on this rank; None before.

    Raises:
        ConfigError: `ref` is no reference, or `cache` was not made by `node_cache`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = DEFAULT_NAME,
        ref: str | None = None,
        cache: OpenCache | None = None,
        fallback: Sequence[Repository | str] = (),
        trusted_keys: Sequence[str | Path] | None = None,
        planner_bytes: bool = False,
    ) -> None:
        parse_reference(ref or name, "model")
        if cache is not None and not callable(cache):
            raise ConfigError(
                f"cache is {cache!r}; a DcpReader takes datasvc.models.restoring.restore.node_cache of that"
            )
        self.url = os.fspath(path)
        self.ref = ref or name
        self.load_id = str(uuid.uuid4())
        self.version: Resolved | None = None
        self.report: RestoreReport | None = None
        self._given_id: str | os.PathLike[str] = path
        self._cache = cache
        self._fallback = tuple(fallback)
        self._trusted_keys = trusted_keys
        self._planner_bytes = planner_bytes
        self._stored: ShardedVersion | None = None

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where this reads from, as it was said last."""
        return self._given_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `reset` takes it."""
        return is_checkpoint_id(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load. `checkpoint_id`: NAME, NAME@3, a repository's URL (anything with a slash), or URL#NAME@3.

        Raises:
            ConfigError: it is none of these.
        """
        if checkpoint_id:
            wanted = CheckpointId.parse(checkpoint_id)
            self.url = wanted.url or self.url
            self.ref = wanted.ref or self.ref
            self._given_id = checkpoint_id
        self._stored = None
        self.load_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta:
        """Return which load this is."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self.load_id)

    def read_metadata(self) -> Metadata:
        """Return the metadata of the version that is meant now.

        Where it cannot be read whoever looks into the metadata gets the error, one of `read_sharded`: of errors that
        are raised here torch keeps only the words.
        """
        try:
            with errors_that_travel():
                repository = Repository.open(self.url)
                copies = StoredCopies(repository, fallback=self._fallback, cache=self._cache)
                self._stored = read_sharded(repository, copies, self.ref, trusted_keys=self._trusted_keys)
        except DatasvcError as error:
            return _UnreadMetadata(error)
        metadata = self._stored.sharding.metadata
        saved = metadata.storage_meta or StorageMeta()
        metadata.storage_meta = replace(
            saved, checkpoint_id=f"{self.url}#{self._stored.version}", load_id=self.load_id
        )
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Raise what kept `read_metadata` from reading; else it has read what is needed."""
        if isinstance(metadata, _UnreadMetadata):
            raise metadata.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is: where chunks lie the version says."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Let all ranks read the coordinator's version: a save may have landed while they looked for the newest."""
        assert self._stored is not None, "torch reads the metadata before it plans"
        return [replace(plan, storage_data=self._stored.version.version) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan wants into the planner's tensors and values.

        Raises:
            CorruptDataError: no copy of a chunk has the bytes that its digest says; names the tensor. The planner's
                tensors may be filled in part then, with bytes not to be used.
            ConfigError: a value is for another planner, or is a planner's own bytes that nobody asked for.
            NotFoundError, UnavailableError: as `load_tensors`.
        """
        assert self._stored is not None, "torch reads the metadata before the data"
        with errors_that_travel():
            stored = self._stored
            agreed = plan.storage_data or stored.version.version
            if agreed != stored.version.version:
                ref = f"{stored.version.name}@{agreed}"
                stored = read_sharded(stored.repository, stored.copies, ref, trusted_keys=self._trusted_keys)
            self._stored, self.version = stored, stored.version
            self.report = load_items(stored, plan.items, planner, planner_bytes=self._planner_bytes)
        for bad in self.report.bad_copies:
            logger.warning("%s: a bad copy, another one was read: %s", stored.version, bad)
        future: Future[None] = Future()
        future.set_result(None)
        return future


class _UnreadMetadata(Metadata):
    """Stands for metadata that could not be read: planners and torch look into it before anything else."""

    def __init__(self, error: DatasvcError) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        if name == "state_dict_metadata":
            raise self.error
        raise AttributeError(name)
