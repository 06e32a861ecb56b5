"""Plans which ranks hold which blocks of the tensors of a distributed save, and checks that they hold all.

All functions are pure. A rank describes what it holds, and each rank computes the same plan from all descriptions. A
tensor may be whole on all ranks (replicated), divided among them (sharded), or only on some of them, as with the
stages of a pipeline.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from datasvc.errors import ConfigError
from datasvc.models.tensors.chunks import Box, Shape, is_tiling, plan_part_chunks
from datasvc.models.tensors.container_types import typed_as, untyped
from datasvc.models.tensors.state_tree import dict_parts, dict_skeleton
from datasvc.models.tensors.tensor_table import ITEM_BYTES

SMALL_BYTES: Final = 64 << 10
"""Chunks below this size are packed, several into one object. The first rank that holds one stores it, so that packs
are few."""


class HeldTensor(NamedTuple):
    """What one rank holds of a tensor: dtype, shape of the whole tensor, and the box of its part; None: nothing."""

    dtype: str
    shape: Shape
    box: Box | None

    @classmethod
    def from_json(cls, value: Any) -> HeldTensor:
        """Return the value of a `HeldTensor` that was sent as JSON."""
        dtype, shape, box = value
        return cls(dtype, tuple(shape), None if box is None else (tuple(box[0]), tuple(box[1])))


class BlockId(NamedTuple):
    """Name of a tensor, and the start of a block in it."""

    name: str
    start: Shape


@dataclass(frozen=True)
class SharedBlock:
    """A block of a tensor, and the ranks that hold it, ascending; one of them stores each chunk of the block."""

    name: str
    box: Box
    ranks: tuple[int, ...]

    @property
    def id(self) -> BlockId:
        """Name of the tensor, and start of the block."""
        return BlockId(self.name, self.box[0])


@dataclass(frozen=True)
class SharedPlan:
    """Tensors and blocks of the state that the ranks share. They are the same in all saves of a run.

    Attributes:
        tensors: dtype and shape of each whole tensor, by name.
        blocks: blocks that tile the tensors, sorted by name and start.
        skeleton_ranks: ranks other than 0 whose skeletons have keys that those of lower ranks may lack.
    """

    tensors: Mapping[str, tuple[str, Shape]]
    blocks: tuple[SharedBlock, ...]
    skeleton_ranks: tuple[int, ...] = ()


def plan_replicas(tensors: Mapping[str, tuple[str, Shape]], num_ranks: int) -> SharedPlan:
    """Return the plan if every rank holds the same whole `tensors`, given by dtype and shape."""
    ranks = tuple(range(num_ranks))
    blocks = (SharedBlock(name, ((0,) * len(shape), shape), ranks) for name, (_, shape) in sorted(tensors.items()))
    return SharedPlan(tensors, tuple(blocks))


def plan_shared(held: Sequence[Mapping[str, HeldTensor]], outlines: Sequence[Any]) -> SharedPlan:
    """Return the plan for what the ranks hold, by rank.

    Args:
        held: what each rank holds of each tensor, by name.
        outlines: for each rank, `outline` of its skeleton.

    Raises:
        ConfigError: ranks have a tensor with different dtypes or shapes; the parts of a tensor do not tile it; or a
            tensor is in a list that has another length on another rank. The message names the tensor.
    """
    first_rank: dict[str, int] = {}  # by name, the lowest rank that has the tensor
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, tensors in enumerate(held):
        for name, tensor in tensors.items():
            first = held[first_rank.setdefault(name, rank)][name]
            if first[:2] != tensor[:2]:
                raise ConfigError(
                    f"rank {rank} saves other tensors than rank {first_rank[name]}: rank {first_rank[name]} has "
                    f"'{name} {first.dtype}{list(first.shape)}' where rank {rank} has "
                    f"'{name} {tensor.dtype}{list(tensor.shape)}'; pass the state of each rank as rank_state="
                )
            boxes = holders.setdefault(name, {})
            if tensor.box is not None:
                boxes.setdefault(tensor.box, []).append(rank)
    described = {name: held[rank][name] for name, rank in first_rank.items()}
    for name, boxes in holders.items():
        if not is_tiling(described[name].shape, list(boxes)):
            parts = ", ".join(
                f"{list(size)} at {list(start)} on rank {ranks[0]}"
                for (start, size), ranks in list(boxes.items())[:4]
            )
            raise ConfigError(
                f"the ranks of this save do not hold each element of tensor {name!r} of shape "
                f"{list(described[name].shape)} exactly once; they hold {parts or 'nothing'}; save with all ranks of "
                "its mesh (group=), and with the same sharding on all of them"
            )
    merged = outlines[0]
    skeleton_ranks = []
    for rank, other in enumerate(outlines):
        if other not in outlines[:rank] and rank:
            skeleton_ranks.append(rank)
            merged = merge_skeletons(merged, other)
    unreachable = described.keys() - set(_names_in(merged))
    if unreachable:
        name = min(unreachable)
        raise ConfigError(
            f"rank {first_rank[name]} has the tensor {name!r} where a lower rank has another list or value; "
            "use dicts for what differs between ranks, with flatten_optimizer_state_dict=True for the stages of a "
            "pipeline, or rank_state="
        )
    return SharedPlan(
        {name: (tensor.dtype, tensor.shape) for name, tensor in described.items()},
        tuple(
            SharedBlock(name, box, tuple(ranks))
            for name, boxes in sorted(holders.items())
            for box, ranks in sorted(boxes.items())
        ),
        tuple(skeleton_ranks),
    )


def outline(skeleton: Any) -> Any:
    """Return a skeleton with None for every value that is not a tensor, and for every list without tensors.

    Outlines are equal on ranks that have the same keys, whatever the values and the types of dicts and tuples are.
    """
    skeleton = untyped(skeleton)
    if isinstance(skeleton, list):
        items = [outline(item) for item in skeleton]
        return items if any(item is not None for item in items) else None
    if not isinstance(skeleton, dict):
        return None
    if "$dict" in skeleton:
        return {"$dict": [[key, outline(item)] for key, item in skeleton["$dict"]]}
    if "$tuple" in skeleton:
        items = outline(skeleton["$tuple"])
        return None if items is None else {"$tuple": items}
    if "$tensor" in skeleton:
        return {"$tensor": skeleton["$tensor"]}
    if any(key.startswith("$") for key in skeleton):
        return None
    return {key: outline(item) for key, item in skeleton.items()}


def merge_skeletons(first: Any, other: Any) -> Any:
    """Return the skeleton of a state that has the keys of both; where both have a value, it is that of `first`.

    The elements of lists of equal length are merged in turn. Dicts and tuples keep their types in `first`.
    """
    parts, other_parts = dict_parts(first), dict_parts(other)
    if parts is not None and other_parts is not None:
        merged = {
            key: merge_skeletons(part, other_parts[key]) if key in other_parts else part
            for key, part in parts.items()
        }
        merged |= {key: part for key, part in other_parts.items() if key not in merged}
        return typed_as(first, dict_skeleton(merged))
    for mark in (None, "$tuple"):
        items, other_items = (_items(value, mark) for value in (first, other))
        if items is not None and other_items is not None and len(items) == len(other_items):
            merged_items = [merge_skeletons(*both) for both in zip(items, other_items, strict=True)]
            return merged_items if mark is None else typed_as(first, {mark: merged_items})
    return first


def _items(skeleton: Any, mark: str | None) -> list[Any] | None:
    """Return the elements of a list, or of a tuple if `mark` is "$tuple"; None for another value."""
    skeleton = untyped(skeleton)
    if mark is not None:
        skeleton = skeleton.get(mark) if isinstance(skeleton, dict) else None
    return skeleton if isinstance(skeleton, list) else None


def _names_in(skeleton: Any) -> Iterator[str]:
    """Yield the names of the tensors in a skeleton."""
    if isinstance(skeleton, dict) and "$tensor" in skeleton:
        yield skeleton["$tensor"]
    elif isinstance(skeleton, dict):
        for item in skeleton.values():
            yield from _names_in(item)
    elif isinstance(skeleton, list):
        for item in skeleton:
            yield from _names_in(item)


# `distributed_save` calls it. Shared tensors may be whole on all ranks, or divided among them; only one of the ranks
# that hold a chunk stores it.


def partition_writes(
    plan: SharedPlan, num_ranks: int, *, first_only: Collection[BlockId] = ()
) -> list[list[tuple[str, Box]]]:
    """Assign the chunks of blocks to ranks that hold them, balanced by bytes as far as whole chunks allow.

    Args:
        plan: blocks of the shared tensors, and the ranks that hold each.
        num_ranks: number of ranks, at least 1.
        first_only: blocks that the first of their ranks alone stores, because their bytes differ between the ranks.

    Returns:
        For each rank the chunks that it stores, each as the tensor's name and the chunk's box (start and shape).
        Every chunk is in exactly one list. Equal arguments give equal results, so each rank computes the same plan
        without messages.
    """
    assigned: list[list[tuple[str, Box]]] = [[] for _ in range(num_ranks)]
    load_bytes = [0] * num_ranks
    large = []
    for block in plan.blocks:
        dtype, shape = plan.tensors[block.name]
        is_fixed = len(block.ranks) == 1 or block.id in first_only
        for box in plan_part_chunks(block.box, shape, ITEM_BYTES[dtype]):
            nbytes = math.prod(box[1]) * ITEM_BYTES[dtype]
            if is_fixed or nbytes < SMALL_BYTES:
                assigned[block.ranks[0]].append((block.name, box))
                load_bytes[block.ranks[0]] += nbytes
            else:
                large.append((nbytes, block, box))
    # Assign the largest chunk first, to the rank with the smallest load: the greedy rule for balanced partitions.
    large.sort(key=lambda chunk: -chunk[0])
    # Chunks that only some ranks hold come first. A search over these few ranks is fast; for chunks that all ranks
    # hold, a heap of (load, rank) finds the rank.
    for nbytes, block, box in large:
        if len(block.ranks) < num_ranks:
            rank = min(block.ranks, key=lambda rank: (load_bytes[rank], rank))
            assigned[rank].append((block.name, box))
            load_bytes[rank] += nbytes
    loads = [(load, rank) for rank, load in enumerate(load_bytes)]
    heapq.heapify(loads)
    for nbytes, block, box in large:
        if len(block.ranks) == num_ranks:
            load, rank = heapq.heappop(loads)
            assigned[rank].append((block.name, box))
            heapq.heappush(loads, (load + nbytes, rank))
    return assigned
