"""What a rank reads of a stored version: its planner's items, and only the pieces that these meet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from datasvc.errors import ConfigError
from datasvc.models.checkpoint import open_stored
from datasvc.models.dcp.metadata import Sharding, decode_sharding, describe_unsharded
from datasvc.models.dcp.paths import find
from datasvc.models.dcp.values import decode_opaque, wrap_value
from datasvc.models.load import THREADS, load_tensors
from datasvc.models.piece_reader import ObjectSource, PieceReader, check_reaches
from datasvc.models.pieces import Box, intersect, slices
from datasvc.models.records import Piece, TensorRecord
from datasvc.models.tensor_bytes import tensor_of
from datasvc.models.threads import run_in_threads
from datasvc.models.tree import unflatten
from datasvc.repository import Repository, Resolved
from datasvc.repository.objects import parse_digest


@dataclass(frozen=True)
class ShardedVersion:
    """A version, read but for its tensors.

    Attributes:
        repository: that it lies in.
        version: which one.
        sharding: what planners need to know of it.
        records: its tensor table, by name.
        skeleton: of its state tree.
    """

    repository: Repository
    version: Resolved
    sharding: Sharding
    records: Mapping[str, TensorRecord]
    skeleton: Any


@dataclass(frozen=True)
class PieceRead:
    """A piece that is to be read, and where which of its elements go.

    Attributes:
        record: of the tensor.
        piece: of it.
        copies: views of tensors to fill, each with the block of the whole tensor that it takes.
    """

    record: TensorRecord
    piece: Piece
    copies: list[tuple[torch.Tensor, Box]] = field(default_factory=list)


def read_sharded(
    repository: Repository, ref: str, *, trusted_keys: Sequence[str | Path] | None = None
) -> ShardedVersion:
    """Read what a version says of itself. One that was not saved sharded is described as if it was, in one part.

    Args:
        repository: has it.
        ref: NAME, NAME@VERSION or NAME@TAG.
        trusted_keys: as of `open_stored`.

    Raises:
        ConfigError: `ref` is no reference, or something has a later format.
        NotFoundError: there is no such version, or an object of it is missing.
        CorruptDataError: the entry, table, state or sharding was changed; or the version is not signed.
        UnavailableError: the store did not answer.
    """
    stored = open_stored(repository, ref, trusted_keys=trusted_keys)
    records = {record.name: record for record in stored.records}
    named = stored.entry.get("sharding")
    if named is None:
        sharding = describe_unsharded(stored.skeleton, records, str(stored.version))
    else:
        raw = repository.objects.read(parse_digest(named))
        sharding = decode_sharding(raw, records, stored.skeleton, str(stored.version))
    return ShardedVersion(repository, stored.version, sharding, records, stored.skeleton)


def load_items(
    stored: ShardedVersion,
    source: ObjectSource,
    items: Sequence[ReadItem],
    planner: LoadPlanner,
    *,
    planner_bytes: bool = False,
) -> None:
    """Fill the planner's tensors and values. Arguments and errors are those of `Reader` and `Reader.read_data`."""
    tensor_items = [item for item in items if item.type != LoadItemType.BYTE_IO]
    targets = [planner.resolve_tensor(item).detach() for item in tensor_items]
    blocks = [(*_block(stored, item), target) for item, target in zip(tensor_items, targets, strict=True)]

    reads = plan_reads(blocks)
    reader = PieceReader(source, [each.piece for each in reads])

    def read(each: PieceRead) -> None:
        check_reaches(source, each.record.name, each.piece)
        content = np.empty(each.record.piece_bytes(each.piece), np.uint8)
        reader.read(each.record.name, each.piece, content)
        loaded = tensor_of(content, each.record.dtype, each.piece.shape)
        for target, box in each.copies:
            target.copy_(loaded[slices(box, origin=each.piece.start)])

    run_in_threads(read, [(each,) for each in reads], THREADS)
    for item, target in zip(tensor_items, targets, strict=True):
        planner.commit_tensor(item, target)
    for item in items:
        if item.type == LoadItemType.BYTE_IO:
            _load_value(stored, source, item, planner, planner_bytes=planner_bytes)


def plan_reads(blocks: Iterable[tuple[TensorRecord, Box, torch.Tensor]]) -> list[PieceRead]:
    """Return the pieces that blocks of tensors meet, each once, and which views of their targets each fills.

    Args:
        blocks: of which tensor, where in it, and the tensor of that shape that is to be filled.
    """
    reads: dict[tuple[str, tuple[int, ...]], PieceRead] = {}
    for record, box, target in blocks:
        for piece in record.pieces:
            shared = intersect(box, piece.box)
            if shared is not None:
                read = reads.setdefault((record.name, piece.start), PieceRead(record, piece))
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


def _load_value(
    stored: ShardedVersion, source: ObjectSource, item: ReadItem, planner: LoadPlanner, *, planner_bytes: bool
) -> None:
    key = item.storage_index.fqn
    path = stored.sharding.paths.get(key, (key,))
    value = unflatten(find(stored.skeleton, path), _TensorsOnDemand(stored, source))
    is_opaque = key in stored.sharding.opaque
    if is_opaque:
        planner.load_bytes(item, decode_opaque(value, key, planner, is_wanted=planner_bytes))
    else:
        planner.load_bytes(item, wrap_value(value))


class _TensorsOnDemand(dict[str, torch.Tensor]):
    """The tensors that lie inside values, read when they are met."""

    def __init__(self, stored: ShardedVersion, source: ObjectSource) -> None:
        super().__init__()
        self._stored = stored
        self._source = source

    def __missing__(self, name: str) -> torch.Tensor:
        return load_tensors(self._source, [self._stored.records[name]])[name]
