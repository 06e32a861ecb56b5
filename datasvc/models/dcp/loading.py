"""What a rank reads of a stored version: its planner's items, and only the chunks that these meet."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from datasvc.errors import ConfigError
from datasvc.models.dcp.metadata import Sharding, decode_sharding, describe_unsharded
from datasvc.models.dcp.paths import find
from datasvc.models.dcp.values import decode_opaque, wrap_value
from datasvc.models.restoring.copies import StoredCopies
from datasvc.models.restoring.report import RestoreReport
from datasvc.models.restoring.stored_version import read_version
from datasvc.models.tensors.chunk_reader import ChunkReader, ChunkSource, check_reaches
from datasvc.models.tensors.chunks import Box, intersect, slices
from datasvc.models.tensors.dtypes import bytes_of, dtype_name, is_plain, tensor_of
from datasvc.models.tensors.read import load_tensors, read_in_threads
from datasvc.models.tensors.state_tree import MAX_STATE_BYTES, decode_state, unflatten
from datasvc.models.tensors.tensor_table import Chunk, TensorRecord
from datasvc.models.versions.entry_refs import MAX_SHARDING_BYTES
from datasvc.repository import Repository, Resolved
from datasvc.repository.objects.objects import parse_digest


@dataclass(frozen=True)
class ShardedVersion:
    """A version, read but for its tensors.

    Attributes:
        repository: that it lies in.
        copies: that it is read from.
        version: which one.
        sharding: what planners need to know of it.
        records: its tensor table, by name.
        skeleton: of its state tree.
    """

    repository: Repository
    copies: StoredCopies
    version: Resolved
    sharding: Sharding
    records: Mapping[str, TensorRecord]
    skeleton: Any


@dataclass(frozen=True)
class ChunkRead:
    """A chunk that is to be read, and where which of its elements go.

    Attributes:
        record: of the tensor.
        chunk: of it.
        copies: views of tensors to fill, each with the block of the whole tensor that it takes.
    """

    record: TensorRecord
    chunk: Chunk
    copies: list[tuple[torch.Tensor, Box]] = field(default_factory=list)

    @property
    def only_target(self) -> torch.Tensor | None:
        """The view that is to be what the chunk is, in memory that can be read into; None where there is no such."""
        (target, box), *others = self.copies
        if others or box != self.chunk.box or dtype_name(target) != self.record.dtype or not is_plain(target):
            return None
        return target


def read_sharded(
    repository: Repository, copies: StoredCopies, ref: str, *, trusted_keys: Sequence[str | Path] | None = None
) -> ShardedVersion:
    """Read what a version says of itself. One that was not saved sharded is described as if it was, in one part.

    Args:
        repository: has it.
        copies: of what it is made of.
        ref: NAME, NAME@VERSION or NAME@TAG.
        trusted_keys: as of `read_version`.

    Raises:
        ConfigError: `ref` is no reference, or something has a later format.
        NotFoundError: there is no such version, or an object of it is missing.
        CorruptDataError: the entry, table, state or sharding was changed; or the version is not signed.
        UnavailableError: the store did not answer.
    """
    stored = read_version(repository, ref, read=copies.read, trusted_keys=trusted_keys)
    version = str(stored.version)
    skeleton = decode_state(copies.read(stored.state, MAX_STATE_BYTES), version)
    records = {record.name: record for record in stored.records}
    named = stored.entry.get("sharding")
    if named is None:
        sharding = describe_unsharded(skeleton, records, version)
    else:
        sharding = decode_sharding(copies.read(parse_digest(named), MAX_SHARDING_BYTES), records, skeleton, version)
    return ShardedVersion(repository, copies, stored.version, sharding, records, skeleton)


def load_items(
    stored: ShardedVersion, items: Sequence[ReadItem], planner: LoadPlanner, *, planner_bytes: bool = False
) -> RestoreReport:
    """Fill the planner's tensors and values. Arguments and errors: see `DcpReader` and `DcpReader.read_data`."""
    began = time.monotonic()
    tensor_items = [item for item in items if item.type != LoadItemType.BYTE_IO]
    value_items = [item for item in items if item.type == LoadItemType.BYTE_IO]
    targets = [planner.resolve_tensor(item).detach() for item in tensor_items]
    reads = plan_reads((*_block(stored, item), target) for item, target in zip(tensor_items, targets, strict=True))
    inside = _find_inside(stored, value_items)
    wanted = [*(replace(each.record, chunks=(each.chunk,)) for each in reads), *inside]
    with stored.copies.open_source(wanted) as source:
        _read_chunks(source, reads)
        tensors = load_tensors(source, inside)
    for item, target in zip(tensor_items, targets, strict=True):
        planner.commit_tensor(item, target)
    for item in value_items:
        _load_value(stored, item, tensors, planner, planner_bytes=planner_bytes)
    return stored.copies.report(wanted, time.monotonic() - began)


def _read_chunks(source: ChunkSource, reads: Sequence[ChunkRead]) -> None:
    reader = ChunkReader(source, [each.chunk for each in reads])

    def read(each: ChunkRead) -> None:
        check_reaches(source, each.record.name, each.chunk)
        target = each.only_target
        if target is not None:
            reader.read(each.record.name, each.chunk, bytes_of(target))
            return
        content = np.empty(each.record.chunk_bytes(each.chunk), np.uint8)
        reader.read(each.record.name, each.chunk, content)
        loaded = tensor_of(content, each.record.dtype, each.chunk.shape)
        for target, box in each.copies:
            target.copy_(loaded[slices(box, origin=each.chunk.start)])

    sizes = [each.record.chunk_bytes(each.chunk) for each in reads]
    read_in_threads(source, read, [(each,) for each in reads], sizes)


def plan_reads(blocks: Iterable[tuple[TensorRecord, Box, torch.Tensor]]) -> list[ChunkRead]:
    """Return the chunks that blocks of tensors meet, each once, and which views of their targets each fills.

    Args:
        blocks: of which tensor, where in it, and the tensor of that shape that is to be filled.
    """
    reads: dict[tuple[str, tuple[int, ...]], ChunkRead] = {}
    for record, box, target in blocks:
        for chunk in record.chunks:
            shared = intersect(box, chunk.box)
            if shared is not None:
                read = reads.setdefault((record.name, chunk.start), ChunkRead(record, chunk))
                read.copies.append((target[slices(shared, origin=box[0])], shared))
    return list(reads.values())


def _block(stored: ShardedVersion, item: ReadItem) -> tuple[TensorRecord, Box]:
    """Return which block of which tensor an item wants. Raises ConfigError when there is none such."""
    index = item.storage_index
    name = stored.sharding.names.get(index.fqn)
    if name is None:
        raise ConfigError(f"{stored.version} has no tensor {index.fqn!r}, which the plan was made for; load again")
    record = stored.records[name]
    origin = index.offset if index.offset is not None else (0,) * len(item.lengths)
    start = tuple(a + b for a, b in zip(origin, item.storage_offsets, strict=True))
    shape = tuple(item.lengths)
    fits = len(start) == len(record.shape) and all(
        s >= 0 and s + n <= size for s, n, size in zip(start, shape, record.shape, strict=True)
    )
    if not fits:
        raise ConfigError(
            f"the plan wants {shape} at {start} of {index.fqn!r}, which has {record.shape} in {stored.version}; "
            "load again"
        )
    return record, (start, shape)


def _find_inside(stored: ShardedVersion, items: Sequence[ReadItem]) -> list[TensorRecord]:
    """Return the records of tensors that lie inside values, each once. Raises CorruptDataError: there is no such."""
    met = _Met(stored.records)
    for item in items:
        unflatten(_skeleton_of(stored, item), met)
    return list(met.values())


class _Met(dict[str, Any]):
    """Records of tensors, once somebody has looked for them."""

    def __init__(self, records: Mapping[str, TensorRecord]) -> None:
        super().__init__()
        self._records = records

    def __missing__(self, name: str) -> TensorRecord:
        self[name] = record = self._records[name]
        return record


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
    key = item.storage_index.fqn
    value = unflatten(_skeleton_of(stored, item), tensors)
    if key in stored.sharding.opaque:
        planner.load_bytes(item, decode_opaque(value, key, planner, is_wanted=planner_bytes))
    else:
        planner.load_bytes(item, wrap_value(value))
