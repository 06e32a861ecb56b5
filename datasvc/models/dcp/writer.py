"""`DcpWriter`, a `StorageWriter` of torch.distributed.checkpoint: commits each checkpoint as a version of a model."""

from __future__ import annotations

import math
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from datasvc.errors import ConfigError, DatasvcError
from datasvc.models.dcp.metadata import (
    CheckpointId,
    CheckpointIdMixin,
    VersionStorageMeta,
    encode_sharding,
    planned_paths,
)
from datasvc.models.dcp.values import encode_value, nest, path_of
from datasvc.models.saving.shared_store import Marker, check_markers, write_marker
from datasvc.models.tensors.chunks import Shape, plan_part_chunks, slices
from datasvc.models.tensors.dtypes import check_storable, dtype_name
from datasvc.models.tensors.tensor_table import Chunk, TensorRecord, join_chunks
from datasvc.models.tensors.write import CODECS, Codec, StoredState, TensorBlock, store_chunks, whole_blocks
from datasvc.models.versions.architecture import Architecture
from datasvc.models.versions.code_revision import CodeRevision
from datasvc.models.versions.commit import base_records, commit
from datasvc.models.versions.data_use import DataUse
from datasvc.models.versions.metadata import Execution, VersionMetadata
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.references import check_name

DEFAULT_NAME: Final = "checkpoint"


@contextmanager
def picklable_errors() -> Iterator[None]:
    """Replace errors of other packages by a `DatasvcError`, which every rank can unpickle. Also works as a decorator.

    Torch pickles the error of a rank and sends it to all ranks. A rank that cannot unpickle the error hangs.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, DatasvcError) or type(error).__module__ == "builtins":
            raise
        raise DatasvcError(f"{type(error).__name__}: {error}") from error


class DcpWriter(CheckpointIdMixin, StorageWriter):
    """Save the checkpoints of torch.distributed.checkpoint as versions of a model. Create one on every rank.

    The arguments from `step` on are those of `datasvc.models.save`. Only those given on the coordinator are stored.

    Args:
        path: local folder or fsspec URL of the repository; created if it does not exist.
        name: name of the model; created if it does not exist.
        codec: "none", "planes" or "delta", see `store_chunks`.
        step: number of optimizer steps that produced the state.
        data: data consumed so far.
        config: configuration of the run.
        metrics: metric values by name.
        parent: version that this one continues.
        message: free text for readers of the log.
        code: code of the run.
        environment: environment of the run.
        execution: how the ranks of the run computed its steps.
        architecture: counts of modules and operators, from `describe_architecture`.

    Attributes:
        save_id: id of the current save on this rank.
        committed: version that the last save created; set on the coordinator only. The result of `dcp.save` has it
            on every rank, as `metadata.storage_meta.reference`, which `dcp.load` accepts as `checkpoint_id`.

    Raises:
        ConfigError: the name is not a valid model name, or the codec does not exist.
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
        execution: Execution | None = None,
        architecture: Architecture | None = None,
    ) -> None:
        if codec not in CODECS:
            raise ConfigError(f"{codec!r} is not a valid codec; expected one of {', '.join(CODECS)}")
        super().__init__(path)
        self.name = check_name(name, "model")
        self.codec: Codec = codec
        self.version_metadata = VersionMetadata(
            step,
            data,
            config,
            metrics,
            parent,
            message=message,
            code=code,
            environment=environment,
            execution=execution,
            architecture=architecture,
        )
        self.save_id = str(uuid.uuid4())
        self.committed: Resolved | None = None
        self._repository: Repository | None = None
        self._base: Sequence[TensorRecord] = ()
        self._is_coordinator = False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new save.

        Args:
            checkpoint_id: NAME, the URL of a repository (any text with a slash), or URL#NAME. A part that is not
                given stays as it was.

        Raises:
            ConfigError: `checkpoint_id` has none of these forms, or names a version.
        """
        if checkpoint_id:
            parsed = CheckpointId.parse(checkpoint_id)
            if parsed.ref and "@" in parsed.ref:
                raise ConfigError(
                    f"a save creates a new version and cannot write {parsed.ref!r}; give the name without a version"
                )
            self.url = parsed.url or self.url
            self.name = parsed.ref or self.name
            self._checkpoint_id = checkpoint_id
        self.save_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta:
        """Return the ids of this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    @picklable_errors()
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Open the repository and, for the codec "delta", read the base version. Torch calls this on every rank.

        Raises:
            ConfigError: the save runs without collectives on several ranks.
            UnavailableError: the store does not answer.
        """
        if not kwargs.get("use_collectives", True) and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                "use_collectives=False would create a separate version for each rank; save with use_collectives=True"
            )
        self.committed = None
        self._repository = Repository.create(self.url)
        self._is_coordinator = is_coordinator
        # Ranks may read different base versions if another save commits at this time. This is harmless, because each
        # chunk lists all stored objects from which it is decoded.
        needs_base = self.codec == "delta"
        self._base = base_records(self._repository, self.name, self.version_metadata.parent) if needs_base else ()

    @picklable_errors()
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Write a marker file for `prepare_global_plan`, and return the plan with the marker as `storage_data`.

        Raises UnavailableError if the store does not answer.
        """
        assert self._repository is not None, "torch sets a writer up before it plans"
        if self._is_coordinator:
            # The coordinator checks the markers of the other ranks, and needs none itself.
            return plan
        return replace(plan, storage_data=write_marker(self._repository.storage))

    @picklable_errors()
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that all ranks write to the same repository, and return the plans without their markers.

        Torch calls this on the coordinator, before any tensor is stored. If a planner drops the marker of a rank,
        that rank is not checked here. The commit still checks that all objects exist.

        Raises:
            ConfigError: some ranks write to another place; the message names them.
            UnavailableError: the store does not answer.
        """
        assert self._repository is not None, "torch sets a writer up before it plans"
        markers = [plan.storage_data if isinstance(plan.storage_data, Marker) else None for plan in plans]
        check_markers(self._repository.storage, markers)
        return [replace(plan, storage_data=None) for plan in plans]

    @picklable_errors()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Store the tensors and values of this rank's plan. Readers do not find them before `finish`.

        Raises:
            ConfigError: a tensor or value cannot be stored; the message names it.
            UnavailableError: a write to the store fails.
        """
        assert self._repository is not None, "torch sets a writer up before it writes"
        share = store_share(self._repository, plan, planner, self._base, self.codec)
        sizes = sizes_by_name(share)
        # `pop` reports the size of a tensor once, with the first of its items.
        results = [WriteResult(item.index, sizes.pop(item.index.fqn, 0), share) for item in plan.items]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    @picklable_errors()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Join the shares of all ranks and commit them as one version. Torch calls this on the coordinator only.

        Raises:
            ConfigError: the shares contradict each other, or no rank stored a planned tensor or value.
            ConflictError, UnknownOutcomeError, UnavailableError: see `Log.append`.
        """
        assert self._repository is not None, "torch sets a writer up before it finishes"
        # All results of a rank refer to the same `RankShare`, so take the first; a rank without items has no result.
        shares = [rank_results[0].storage_data for rank_results in results if rank_results]
        opaque_keys = frozenset().union(*(share.opaque for share in shares))
        sharding = self._repository.objects.put(encode_sharding(metadata, opaque_keys, self.save_id))
        self.committed = commit(
            self._repository,
            self.name,
            join_shares(metadata, shares),
            self.version_metadata,
            extra={"sharding": sharding.digest},
            extra_objects=[sharding.digest],
        )
        # Torch sends the metadata to every rank, so add the committed version to it.
        reference = f"{self.url}#{self.committed}"
        metadata.storage_meta = VersionStorageMeta(self.checkpoint_id, self.save_id, reference=reference)

    def __getstate__(self) -> dict[str, Any]:
        # A background save pickles the writer for another process, where `set_up_storage_writer` opens the repository
        # and reads the base version again.
        return {**vars(self), "_repository": None, "_base": ()}


# The share of a rank is the blocks of tensors and the other values that torch's plan assigns to it.


@dataclass(frozen=True)
class RankShare:
    """Part of a sharded save that one rank stored. All write results of the rank refer to the same `RankShare`.

    Attributes:
        chunks: stored chunks, as pairs (name of the tensor, chunk).
        dtypes: dtypes of the tensors in the rank's plan, including tensors of which it has an empty block.
        values: skeletons of the values that are not tensors, by key.
        opaque: keys of values in a format that only their planner can read.
        shapes: shapes of the tensors inside values. Only the rank that stores the value has such a tensor.
        new_bytes: number of bytes that were not in the repository before.
        num_nonfinite: number of NaN and infinite elements, by tensor.
    """

    chunks: Sequence[tuple[str, Chunk]]
    dtypes: Mapping[str, str]
    values: Mapping[str, Any]
    opaque: frozenset[str]
    shapes: Mapping[str, Shape]
    new_bytes: int
    num_nonfinite: Mapping[str, int]


def store_share(
    repository: Repository, plan: SavePlan, planner: SavePlanner, base: Sequence[TensorRecord], codec: Codec
) -> RankShare:
    """Store the items of the final plan of a rank; with the codec "delta", as differences to `base`.

    For errors see `DcpWriter.write_data`.
    """
    blocks: list[TensorBlock] = []
    values: dict[str, Any] = {}
    opaque: set[str] = set()
    shapes: dict[str, Shape] = {}
    for item in plan.items:
        if item.type != WriteItemType.BYTE_IO:
            blocks += _blocks(planner, item)
            continue
        encoded = encode_value(planner, item)
        values[item.index.fqn] = encoded.skeleton
        if encoded.is_opaque:
            opaque.add(item.index.fqn)
        shapes.update({name: tuple(tensor.shape) for name, tensor in encoded.tensors.items()})
        blocks += whole_blocks(encoded.tensors)
    stored = store_chunks(repository.objects, blocks, base=base, codec=codec)
    dtypes = {block.name: dtype_name(block.tensor) for block in blocks}
    return RankShare(stored.chunks, dtypes, values, frozenset(opaque), shapes, stored.new_bytes, stored.num_nonfinite)


def _blocks(planner: SavePlanner, item: WriteItem) -> list[TensorBlock]:
    """Return the rank's block of a tensor, divided into the chunks to store."""
    tensor = planner.resolve_data(item)
    assert item.tensor_data is not None, "an item of another type than BYTE_IO describes a tensor"
    block = item.tensor_data.chunk  # torch's "chunk" is the whole block of a rank
    if not isinstance(tensor, torch.Tensor) or tensor.shape != block.sizes:
        resolved = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ConfigError(
            f"{type(planner).__name__} planned {item.index.fqn!r} as {tuple(block.sizes)} and returned {resolved}; a "
            "planner that changes the shape of a tensor must plan the new shape"
        )
    # Before the slices: those of a wrapper, such as a quantised weight, can be tensors of another class.
    check_storable(item.index.fqn, tensor)
    name, start, tensor = item.index.fqn, tuple(block.offsets), tensor.detach()
    tensor_shape = tuple(item.tensor_data.size)
    boxes = plan_part_chunks((start, tuple(block.sizes)), tensor_shape, tensor.itemsize)
    if not boxes:
        # A rank with an empty block must still report the dtype of the tensor.
        return [TensorBlock(name, start, tensor)]
    return [TensorBlock(name, box[0], tensor[slices(box, origin=start)]) for box in boxes]


def join_shares(metadata: Metadata, shares: Sequence[RankShare]) -> StoredState:
    """Join the shares of all ranks into one state. Raises ConfigError: the shares are contradictory or incomplete."""
    num_nonfinite: Counter[str] = Counter()
    for share in shares:
        num_nonfinite.update(share.num_nonfinite)
    new_bytes = sum(share.new_bytes for share in shares)
    return StoredState(_join_tensors(metadata, shares), _join_values(metadata, shares), new_bytes, num_nonfinite)


def _join_tensors(metadata: Metadata, shares: Sequence[RankShare]) -> list[TensorRecord]:
    """Return the records of all tensors, sorted by name."""
    shapes: dict[str, Shape] = {
        key: tuple(stored.size)
        for key, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    dtypes: dict[str, str] = {}
    chunks: dict[str, list[Chunk]] = {}
    for share in shares:
        # torch's metadata does not list tensors inside values: only the rank that stored such a tensor has its shape.
        for name, shape in share.shapes.items():
            if name in shapes:
                raise ConfigError(f"two tensors of the state have the name {name!r}; rename one of the keys")
            shapes[name] = shape
        for name, dtype in share.dtypes.items():
            if dtypes.setdefault(name, dtype) != dtype:
                raise ConfigError(f"tensor {name!r} is {dtypes[name]} on one rank and {dtype} on another")
        for name, chunk in share.chunks:
            chunks.setdefault(name, []).append(chunk)
    missing = shapes.keys() - dtypes.keys()
    if missing:
        raise ConfigError(f"no rank stored the tensor {min(missing)!r}, which is in the global plan")
    return [join_chunks(name, dtypes[name], shapes[name], chunks.get(name, ())) for name in sorted(shapes)]


def _join_values(metadata: Metadata, shares: Sequence[RankShare]) -> Any:
    """Return the skeleton of the state tree that the planner flattened."""
    values = {key: skeleton for share in shares for key, skeleton in share.values.items()}
    keys = metadata.state_dict_metadata
    missing = [
        key for key, stored in keys.items() if not isinstance(stored, TensorStorageMetadata) and key not in values
    ]
    if missing:
        raise ConfigError(f"no rank stored the value {missing[0]!r}, which is in the global plan")
    paths = planned_paths(metadata)
    # A key without a value is that of a tensor. The skeleton refers to the tensor by its name.
    return nest({path_of(paths, key): values.get(key, {"$tensor": key}) for key in keys})


def sizes_by_name(share: RankShare) -> dict[str, int]:
    """Return the size in memory of the chunks that a rank stored, in bytes by tensor."""
    sizes: dict[str, int] = {}
    for name, chunk in share.chunks:
        sizes[name] = sizes.get(name, 0) + math.prod(chunk.shape) * getattr(torch, share.dtypes[name]).itemsize
    return sizes
