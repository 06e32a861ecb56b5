"""What a rank stores of a sharded save, and how the coordinator joins the shares of all ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from datasvc.errors import ConfigError
from datasvc.models.dcp.metadata import planned_paths
from datasvc.models.dcp.paths import path_of
from datasvc.models.dcp.values import encode_value, nest
from datasvc.models.tensors.chunks import CHUNK_BYTES, Box, Shape, plan_chunks, slices
from datasvc.models.tensors.dtypes import dtype_name
from datasvc.models.tensors.tensor_table import Chunk, TensorRecord, join_chunks
from datasvc.models.tensors.write import Codec, TensorBlock, store_chunks
from datasvc.models.versions.commit import StoredState
from datasvc.repository import Repository

_FINEST_CHUNK_BYTES: Final = 512 << 10
_PARTS_OF_TENSOR: Final = 16


@dataclass(frozen=True)
class RankShare:
    """What one rank stored. Every write result of the rank refers to the same one.

    Attributes:
        chunks: with the name of their tensor.
        dtypes: of the tensors that this rank held something of, even nothing.
        values: skeletons of what is no tensor, by key.
        opaque: keys of values that only their planner understands.
        shapes: of tensors that lie inside values, and so belong to this rank alone.
        new_bytes: that were not in the repository before.
        num_nonfinite: NaN and infinities by tensor.
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
    """Store what the final plan of a rank holds, differences to `base` where the codec is "delta".

    Raises:
        ConfigError: a tensor or value cannot be stored; names it.
        UnavailableError: the store failed.
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
        for name, tensor in encoded.tensors.items():
            shapes[name] = tuple(tensor.shape)
            blocks.append(TensorBlock(name, (0,) * tensor.dim(), tensor))
    stored = store_chunks(repository.objects, blocks, base=base, codec=codec)
    dtypes = {block.name: dtype_name(block.tensor) for block in blocks}
    return RankShare(stored.chunks, dtypes, values, frozenset(opaque), shapes, stored.new_bytes, stored.num_nonfinite)


def _blocks(planner: SavePlanner, item: WriteItem) -> list[TensorBlock]:
    """Return what a rank holds of a tensor, cut as it is to be stored."""
    tensor = planner.resolve_data(item)
    assert item.tensor_data is not None, "items that are no bytes describe a tensor"
    chunk = item.tensor_data.chunk
    if not isinstance(tensor, torch.Tensor) or tensor.shape != chunk.sizes:
        made = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ConfigError(
            f"{type(planner).__name__} planned {item.index.fqn!r} as {tuple(chunk.sizes)} and gave {made}; a planner "
            "that changes a tensor's shape must plan the new one"
        )
    name, start, tensor = item.index.fqn, tuple(chunk.offsets), tensor.detach()
    whole = tuple(item.tensor_data.size)
    boxes = plan_parts(start, tuple(chunk.sizes), whole, tensor.itemsize)
    # A rank that holds nothing still says of which dtype.
    return [
        TensorBlock(name, box_start, tensor[slices((box_start, shape), origin=start)]) for box_start, shape in boxes
    ] or [TensorBlock(name, start, tensor)]


def plan_parts(start: Shape, shape: Shape, whole: Shape, item_bytes: int) -> list[Box]:
    """Return the boxes in which a rank's block of a tensor of shape `whole` is stored; [] for an empty block.

    A whole tensor is cut as any other save cuts it, so that equal ones are stored once. A part is cut finer: other
    numbers of ranks will want parts of it, and a chunk is always read in full.
    """
    if shape == whole:
        finest = CHUNK_BYTES
    else:
        finest = min(CHUNK_BYTES, max(_FINEST_CHUNK_BYTES, math.prod(whole) * item_bytes // _PARTS_OF_TENSOR))
    return [
        (tuple(a + b for a, b in zip(start, inner, strict=True)), size)
        for inner, size in plan_chunks(shape, item_bytes, chunk_bytes=finest)
    ]


def join_shares(metadata: Metadata, shares: Sequence[RankShare]) -> StoredState:
    """Return what all ranks have stored as one state. Raises ConfigError where their shares do not make it up."""
    num_nonfinite: Counter[str] = Counter()
    for share in shares:
        num_nonfinite.update(share.num_nonfinite)
    new_bytes = sum(share.new_bytes for share in shares)
    return StoredState(_join_tensors(metadata, shares), _join_values(metadata, shares), new_bytes, num_nonfinite)


def _join_tensors(metadata: Metadata, shares: Sequence[RankShare]) -> list[TensorRecord]:
    shapes: dict[str, Shape] = {
        key: tuple(stored.size)
        for key, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    dtypes: dict[str, str] = {}
    chunks: dict[str, list[Chunk]] = {}
    for share in shares:
        for name, shape in share.shapes.items():
            if name in shapes:
                raise ConfigError(f"two tensors of the state are called {name!r}; rename one of its keys")
            shapes[name] = shape
        for name, dtype in share.dtypes.items():
            if dtypes.setdefault(name, dtype) != dtype:
                raise ConfigError(f"tensor {name!r} is {dtypes[name]} on one rank and {dtype} on another")
        for name, chunk in share.chunks:
            chunks.setdefault(name, []).append(chunk)
    missing = shapes.keys() - dtypes.keys()
    if missing:
        raise ConfigError(f"no rank stored {min(missing)!r}, which the planner promised")
    return [join_chunks(name, dtypes[name], shapes[name], chunks.get(name, ())) for name in sorted(shapes)]


def _join_values(metadata: Metadata, shares: Sequence[RankShare]) -> Any:
    """Return the skeleton of the state tree that the planner flattened."""
    values = {key: skeleton for share in shares for key, skeleton in share.values.items()}
    keys = metadata.state_dict_metadata
    missing = [
        key for key, stored in keys.items() if not isinstance(stored, TensorStorageMetadata) and key not in values
    ]
    if missing:
        raise ConfigError(f"no rank stored {missing[0]!r}, which the planner promised")
    paths = planned_paths(metadata)
    return nest({path_of(paths, key): values.get(key, {"$tensor": key}) for key in keys})


def sizes_by_name(share: RankShare) -> dict[str, int]:
    """Return the bytes in memory of what a rank stored, by tensor."""
    sizes: dict[str, int] = {}
    for name, chunk in share.chunks:
        sizes[name] = sizes.get(name, 0) + math.prod(chunk.shape) * getattr(torch, share.dtypes[name]).itemsize
    return sizes
