"""`DcpReader`, a `StorageReader` for torch.distributed.checkpoint: loads model versions, sharded or not."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from datasvc.cache import Cache
from datasvc.cache.peers.peers import Peers
from datasvc.errors import ConfigError, DatasvcError
from datasvc.models.dcp.metadata import (
    CheckpointId,
    CheckpointIdMixin,
    Sharding,
    VersionStorageMeta,
    decode_sharding,
    describe_unsharded,
)
from datasvc.models.dcp.values import decode_opaque, find, wrap_value
from datasvc.models.dcp.writer import DEFAULT_NAME, picklable_errors
from datasvc.models.restoring.copies import StoredCopies
from datasvc.models.restoring.fill_state import UsedRecords
from datasvc.models.restoring.fit import TensorSpec, plan_load
from datasvc.models.restoring.report import RestoreReport
from datasvc.models.restoring.restore import read_version
from datasvc.models.tensors.chunks import Box, is_inside
from datasvc.models.tensors.dtypes import dtype_name
from datasvc.models.tensors.read import load_tensors, plan_reads, read_chunks
from datasvc.models.tensors.state_tree import MAX_STATE_BYTES, decode_state, unflatten
from datasvc.models.tensors.tensor_table import TensorRecord
from datasvc.models.versions.entry_fields import MAX_SHARDING_BYTES
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.references import parse_reference
from datasvc.repository.objects.objects import parse_digest
from datasvc.repository.store.redaction import redact_url

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


@dataclass(frozen=True)
class _ValueSpec(TensorSpec):
    """A value that is not a tensor, in a table of differences."""

    def __str__(self) -> str:
        return "a value"


_VALUE = _ValueSpec("value", ())


class DcpLoadPlanner(DefaultLoadPlanner):
    """Plan loads as torch's default planner does; if the state does not fit the checkpoint, list all differences.

    Create one for each load, on every rank: `dcp.load(state, storage_reader=reader, planner=DcpLoadPlanner())`. It
    takes the arguments of `DefaultLoadPlanner`, and works with the checkpoints of any storage reader.
    """

    def create_local_plan(self) -> LoadPlan:
        """Plan the load of this rank.

        Raises:
            ConfigError: the checkpoint lacks a key of the state, or has a tensor of another shape. The message has a
                table of the differences. Nothing was loaded.
        """
        try:
            return super().create_local_plan()
        # torch raises these for the first key that does not fit. Other errors of these classes have no differences.
        except (RuntimeError, ValueError, KeyError) as error:
            table = self._differences()
            if table is None:
                raise
            raise ConfigError(table) from error

    def _differences(self) -> str | None:
        """Return a message with all differences between the state and the checkpoint; None if there are none."""
        assert self.metadata is not None, "torch sets the planner up before it plans"
        stored = self.metadata.state_dict_metadata
        found = {key: _spec_of_stored(value) for key, value in stored.items()}
        expected = {key: _spec_of(value, found.get(key)) for key, value in self.state_dict.items()}
        if self.allow_partial_load:
            expected = {key: spec for key, spec in expected.items() if key in found}
        # Keys of the checkpoint that the state lacks are no error for torch. They are listed, because a key that is
        # missing may be there under another name.
        report = plan_load(expected, found)
        if not (report.missing or report.mismatched):
            return None
        title = redact_url(getattr(self.metadata.storage_meta, "reference", None) or "the checkpoint")
        return (
            f"{title} does not fit the state to load, nothing was loaded: {report}\n"
            "load into the state of the same model, rename its keys, or leave keys out with allow_partial_load=True"
        )


def _spec_of_stored(stored: Any) -> TensorSpec:
    if isinstance(stored, TensorStorageMetadata):
        return TensorSpec(str(stored.properties.dtype).removeprefix("torch."), tuple(stored.size))
    return _VALUE


def _spec_of(value: Any, found: TensorSpec | None) -> TensorSpec:
    """Return the dtype and shape of a value of the state; `found` is that of the checkpoint's value, None without."""
    if not isinstance(value, torch.Tensor):
        return _VALUE
    # torch converts dtypes while it loads, so they are no difference.
    dtype = dtype_name(value) if found is None or found is _VALUE else found.dtype
    return TensorSpec(dtype, tuple(value.shape))


# An item of torch's plan is a block of a tensor, or a value that is not a tensor. Only chunks that overlap the
# planned blocks are read.


@dataclass(frozen=True)
class ShardedVersion:
    """Metadata of a version, without the bytes of its tensors.

    Attributes:
        repository: repository of the version.
        copies: repositories and cache that its objects are read from.
        version: name and number of the version.
        sharding: metadata for torch's planners.
        records: records of its tensors, by name in the tensor table.
        skeleton: skeleton of its state tree.
    """

    repository: Repository
    copies: StoredCopies
    version: Resolved
    sharding: Sharding
    records: Mapping[str, TensorRecord]
    skeleton: Any


def read_sharded(
    repository: Repository, copies: StoredCopies, ref: str, *, trusted_keys: Sequence[str | Path] | None = None
) -> ShardedVersion:
    """Read the metadata of a version. The metadata of an unsharded version describes each tensor as a single block.

    For arguments and errors see `read_version`. A damaged state or sharding object raises CorruptDataError too.
    """
    stored = read_version(repository, ref, read=copies.direct.read, trusted_keys=trusted_keys)
    version = str(stored.version)
    skeleton = decode_state(copies.direct.read(stored.state, MAX_STATE_BYTES), version)
    records = {record.name: record for record in stored.records}
    digest = stored.entry.get("sharding")
    if digest is None:
        sharding = describe_unsharded(skeleton, records, version)
    else:
        sharding = decode_sharding(
            copies.direct.read(parse_digest(digest), MAX_SHARDING_BYTES), records, skeleton, version
        )
    return ShardedVersion(repository, copies, stored.version, sharding, records, skeleton)


def load_items(
    stored: ShardedVersion, items: Sequence[ReadItem], planner: LoadPlanner, *, planner_bytes: bool = False
) -> RestoreReport:
    """Fill the planner's tensors and values. For errors see `DcpReader.read_data`.

    `planner_bytes`: whether `planner` may get bytes that another planner stored in its own format, see `DcpReader`.
    """
    began_s = time.monotonic()
    tensor_items = [item for item in items if item.type != LoadItemType.BYTE_IO]
    value_items = [item for item in items if item.type == LoadItemType.BYTE_IO]
    # The planner's tensors are filled in place. Detach them, because autograd does not allow writes to parameters.
    targets = [planner.resolve_tensor(item).detach() for item in tensor_items]
    reads = plan_reads((*_block(stored, item), target) for item, target in zip(tensor_items, targets, strict=True))
    inner_records = _find_tensors_in_values(stored, value_items)
    # A planned block needs only the chunks that it overlaps. A tensor inside a value needs all its chunks.
    needed = [*(replace(read.record, chunks=(read.chunk,)) for read in reads), *inner_records]
    with stored.copies.open_source(needed) as source:
        read_chunks(source, reads)
        tensors = load_tensors(source, inner_records)
    for item, target in zip(tensor_items, targets, strict=True):
        planner.commit_tensor(item, target)
    for item in value_items:
        _load_value(stored, item, tensors, planner, planner_bytes=planner_bytes)
    return stored.copies.report(needed, time.monotonic() - began_s)


def _block(stored: ShardedVersion, item: ReadItem) -> tuple[TensorRecord, Box]:
    """Return the record of the tensor that an item reads, and the box of the block to read.

    Raises ConfigError: the version has no such tensor or block, for example because the rank planned for another one.
    """
    index = item.storage_index
    name = stored.sharding.names.get(index.fqn)
    if name is None:
        raise ConfigError(
            f"the plan needs the tensor {index.fqn!r}, which {stored.version} does not have; load again, because the "
            "ranks may have planned for different versions"
        )
    record = stored.records[name]
    # The metadata divides the tensor into blocks. The offsets of an item are relative to its block, which begins at
    # `index.offset` of the tensor.
    origin = index.offset if index.offset is not None else (0,) * len(item.lengths)
    start = tuple(a + b for a, b in zip(origin, item.storage_offsets, strict=True))
    shape = tuple(item.lengths)
    if not is_inside((start, shape), record.shape):
        raise ConfigError(
            f"the plan needs the block of shape {shape} at {start} of {index.fqn!r}, which has the shape "
            f"{record.shape} in {stored.version}; load again, because the ranks may have planned for different "
            "versions"
        )
    return record, (start, shape)


def _find_tensors_in_values(stored: ShardedVersion, items: Sequence[ReadItem]) -> list[TensorRecord]:
    """Return the records of the tensors inside values, such as a tuple of tensors; each record once.

    Raises CorruptDataError: a tensor is not in the table.
    """
    used = UsedRecords(stored.records)
    for item in items:
        unflatten(_skeleton_of(stored, item), used)  # looks up every tensor of the value
    return list(used.values())


def _skeleton_of(stored: ShardedVersion, item: ReadItem) -> Any:
    key = item.storage_index.fqn
    return find(stored.skeleton, stored.sharding.paths.get(key, (key,)))


def _load_value(
    stored: ShardedVersion,
    item: ReadItem,
    tensors: Mapping[str, torch.Tensor],
    planner: LoadPlanner,
    *,
    planner_bytes: bool,
) -> None:
    """Give a value to the planner: the stored bytes if a planner encoded it, otherwise the value pickled by torch."""
    key = item.storage_index.fqn
    # The value is pickled here and unpickled by torch's planner: the class of a named tuple may not allow that.
    value = unflatten(_skeleton_of(stored, item), tensors, named=False)
    if key in stored.sharding.opaque:
        planner.load_bytes(item, decode_opaque(value, key, planner, is_trusted=planner_bytes))
    else:
        planner.load_bytes(item, wrap_value(value))
