"""Stores a rank's share of a sharded save, and joins the shares of all ranks into one state, for `DcpWriter`.

The share of a rank is the blocks of tensors and the other values that torch's plan assigns to it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from datasvc.errors import ConfigError
from datasvc.models.dcp.metadata import planned_paths
from datasvc.models.dcp.values import encode_value, nest, path_of
from datasvc.models.tensors.chunks import Shape, plan_part_chunks, slices
from datasvc.models.tensors.dtypes import check_storable, dtype_name
from datasvc.models.tensors.tensor_table import Chunk, TensorRecord, join_chunks
from datasvc.models.tensors.write import Codec, StoredState, TensorBlock, store_chunks, whole_blocks
from datasvc.repository import Repository


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
