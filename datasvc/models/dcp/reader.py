"""`DcpReader`, a `StorageReader` for torch.distributed.checkpoint: loads model versions, sharded or not."""

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

from datasvc.cache import Cache
from datasvc.cache.peers.peers import Peers
from datasvc.errors import DatasvcError
from datasvc.models.dcp.checkpoint_id import CheckpointId, CheckpointIdMixin, VersionStorageMeta
from datasvc.models.dcp.loading import ShardedVersion, load_items, read_sharded
from datasvc.models.dcp.writer import DEFAULT_NAME, picklable_errors
from datasvc.models.restoring.copies import StoredCopies
from datasvc.models.restoring.report import RestoreReport
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.references import parse_reference

logger = logging.getLogger(__name__)


class DcpReader(CheckpointIdMixin, StorageReader):
    """Load model versions through torch.distributed.checkpoint, sharded or not. Create one on every rank.

    A rank reads only the chunks that its plan needs, and verifies every byte. If a chunk is missing, damaged or
    unavailable, it is read from the next repository that has a good copy. Bad copies are listed in the report, and
    are logged as warnings.

    Args:
        path: repository: local folder or fsspec URL.
        name: name of the model; its newest version is read.
        ref: version to read instead of the newest of `name`: "NAME@3" or "NAME@tag".
        cache: the node's cache, or its folder; the cache must have a budget. It fetches each missing object once per
            node, as a whole, from the repository or `fallback`.
        peers: other nodes to fetch from; only if `cache` is a folder.
        fallback: other repositories, or their URLs, that may have copies of objects, in the order to try.
        trusted_keys: files of public keys, see `datasvc.models.restoring.restore.read_version`.
        planner_bytes: whether values in a planner's own format are given to the planner that loads. Use it only for
            versions from people you trust: that planner may unpickle the bytes.

    Attributes:
        load_id: id of this load on this rank.
        version: version that the last load read; None before the first load.
        report: report of the last load on this rank; None before the first load.

    Raises:
        ConfigError: `ref` is not a valid reference.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = DEFAULT_NAME,
        ref: str | None = None,
        cache: Cache | str | Path | None = None,
        peers: Peers | None = None,
        fallback: Sequence[Repository | str] = (),
        trusted_keys: Sequence[str | Path] | None = None,
        planner_bytes: bool = False,
    ) -> None:
        parse_reference(ref or name, "model")
        super().__init__(path)
        self.ref = ref or name
        self.load_id = str(uuid.uuid4())
        self.version: Resolved | None = None
        self.report: RestoreReport | None = None
        self._cache, self._peers = cache, peers
        self._fallback = tuple(fallback)
        self._trusted_keys = trusted_keys
        self._planner_bytes = planner_bytes
        self._stored: ShardedVersion | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new load.

        Args:
            checkpoint_id: NAME, NAME@3, the URL of a repository (any text with a slash), or URL#NAME@3.

        Raises:
            ConfigError: `checkpoint_id` has none of these forms.
        """
        if checkpoint_id:
            parsed = CheckpointId.parse(checkpoint_id)
            self.url = parsed.url or self.url
            self.ref = parsed.ref or self.ref
            self._checkpoint_id = checkpoint_id
        self._stored = None
        self.load_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta:
        """Return the ids of this load."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self.load_id)

    def read_metadata(self) -> Metadata:
        """Return the metadata of the version to read.

        If the version cannot be read, the result raises the error of `read_sharded` at its first use.
        """
        try:
            with picklable_errors():
                repository = Repository.open(self.url)
                copies = StoredCopies(repository, cache=self._cache, peers=self._peers, fallback=self._fallback)
                self._stored = read_sharded(repository, copies, self.ref, trusted_keys=self._trusted_keys)
        except DatasvcError as error:
            # Do not raise here: torch would keep only the text of the error and lose its type.
            return _UnreadMetadata(error)
        metadata = self._stored.sharding.metadata
        saved = metadata.storage_meta or StorageMeta()
        metadata.storage_meta = VersionStorageMeta(
            self.checkpoint_id, saved.save_id, self.load_id, saved.modules, f"{self.url}#{self._stored.version}"
        )
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Raise the error of `read_metadata`, if there was one."""
        if isinstance(metadata, _UnreadMetadata):
            raise metadata.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged: the tensor table of the version already lists where all chunks are stored."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Add the coordinator's version to the plans, so that all ranks read it."""
        assert self._stored is not None, "torch reads the metadata before it plans"
        # Each rank resolves the newest version by itself. During a concurrent save, ranks may get different versions.
        return [replace(plan, storage_data=self._stored.version.version) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of the plan into the planner's tensors and values.

        Raises:
            CorruptDataError: no copy of a chunk matches its digest; the message names the tensor. The planner's
                tensors may then be partly filled with invalid data.
            ConfigError: the plan does not fit the version, or a value is in a planner's own format and
                `planner_bytes` is not set.
            NotFoundError, UnavailableError: see `load_tensors`.
        """
        assert self._stored is not None, "torch reads the metadata before the data"
        with picklable_errors():
            stored = self._stored
            # This rank may have resolved another version than the coordinator: read the coordinator's version.
            coordinator_version = plan.storage_data or stored.version.version
            if coordinator_version != stored.version.version:
                ref = f"{stored.version.name}@{coordinator_version}"
                stored = read_sharded(stored.repository, stored.copies, ref, trusted_keys=self._trusted_keys)
            self._stored, self.version = stored, stored.version
            self.report = load_items(stored, plan.items, planner, planner_bytes=self._planner_bytes)
        for bad in self.report.bad_copies:
            logger.warning("%s: a copy is bad, and another one was read instead: %s", stored.version, bad)
        future: Future[None] = Future()
        future.set_result(None)
        return future


class _UnreadMetadata(Metadata):
    """Placeholder for metadata that could not be read. Its use by torch or a planner raises the error."""

    def __init__(self, error: DatasvcError) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for absent attributes. The other fields of `Metadata` have defaults in the class.
        if name == "state_dict_metadata":
            raise self.error
        raise AttributeError(name)
