"""Plans which ranks hold which blocks of the tensors of a distributed save, and checks that they hold all.

All functions are pure. A rank describes what it holds, and each rank computes the same plan from all descriptions. A
tensor may be whole on all ranks (replicated), divided among them (sharded), or only on some of them, as with the
stages of a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from datasvc.errors import ConfigError
from datasvc.models.tensors.chunks import Box, Shape, is_tiling
from datasvc.models.tensors.container_types import typed_as, untyped
from datasvc.models.tensors.state_tree import dict_parts, dict_skeleton


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
