"""Loads the items of a rank's load plan from a stored version, for `DcpReader`.

An item of torch's plan is a block of a tensor, or a value that is not a tensor. Only chunks that overlap the planned
blocks are read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from datasvc.errors import ConfigError
from datasvc.models.dcp.metadata import Sharding, decode_sharding, describe_unsharded
from datasvc.models.dcp.values import decode_opaque, find, wrap_value
from datasvc.models.restoring.copies import StoredCopies
from datasvc.models.restoring.fill_state import UsedRecords
from datasvc.models.restoring.report import RestoreReport
from datasvc.models.restoring.restore import read_version
from datasvc.models.tensors.chunks import Box, is_inside
from datasvc.models.tensors.read import load_tensors, plan_reads, read_chunks
from datasvc.models.tensors.state_tree import MAX_STATE_BYTES, decode_state, unflatten
from datasvc.models.tensors.tensor_table import TensorRecord
from datasvc.models.versions.entry_refs import MAX_SHARDING_BYTES
from datasvc.repository import Repository, Resolved
from datasvc.repository.objects.objects import parse_digest


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
