"""Types in a state that JSON lacks, such as sets, and tensors that share their memory (tied tensors).

In a skeleton they are marks around the plain value: `{"$typed": [PLAIN, KIND, ...]}` with the kinds of `value_types`,
and `{"$tensor": NAME, "$tied": FIRST}` for a tensor with the memory of the tensor FIRST. In a state object they are a
list beside the plain tree. Releases that do not read the list, or a kind in it, restore plain values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from datasvc.models.tensors.tensor_classes import memory_of
from datasvc.models.tensors.value_types import is_kind

if TYPE_CHECKING:
    import torch


def untyped(skeleton: Any) -> Any:
    """Return the skeleton of the plain value in that of a value with a type; else `skeleton`."""
    if isinstance(skeleton, dict) and isinstance(skeleton.get("$typed"), list) and skeleton["$typed"]:
        return skeleton["$typed"][0]
    return skeleton


def typed_as(skeleton: Any, plain: Any) -> Any:
    """Return `plain`, the skeleton of a plain value, with the type that `skeleton` has; see `untyped`."""
    if untyped(skeleton) is not skeleton:
        return {"$typed": [plain, *skeleton["$typed"][1:]]}
    return plain


def kind_of(skeleton: Any) -> str | None:
    """Return the kind of a value with a type; None for any other value."""
    return None if untyped(skeleton) is skeleton else skeleton["$typed"][1]


def tied_tensors(skeleton: Any) -> dict[str, str]:
    """Return the tied tensors in a skeleton: the name of the first tensor with this memory, by name of the other."""
    tied, parts = {}, [skeleton]
    while parts:
        part = parts.pop()
        # What a damaged state has instead is an error of `unflatten`.
        if isinstance(part, dict) and [*part] == ["$tensor", "$tied"] and {*map(type, part.values())} == {str}:
            tied[part["$tensor"]] = part["$tied"]
        elif isinstance(part, dict):
            parts.extend(part.values())
        elif isinstance(part, list):
            parts.extend(part)
    return tied


def mark_tied(leaves: Iterable[tuple[dict[str, Any], torch.Tensor]]) -> None:
    """Mark tensors with the same elements of the same memory in their skeletons, `{"$tensor": NAME}`, as tied."""
    leaves = list(leaves)
    addresses = [_address(tensor) for _, tensor in leaves]
    num_at = Counter(addresses)
    first_names: dict[Any, str] = {}
    for (leaf, tensor), address in zip(leaves, addresses, strict=True):
        if num_at[address] == 1:
            continue  # most tensors: answer fast
        memory = memory_of(tensor)
        if memory is not None and first_names.setdefault(memory, leaf["$tensor"]) != leaf["$tensor"]:
            leaf["$tied"] = first_names[memory]


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, ValueError):  # see `has_memory`
        return 0


def split_types(skeleton: Any) -> tuple[Any, list[list[Any]]]:
    """Return a skeleton without types, and a list of [PATH, KIND, ...] for JSON; see docs/reference/formats.md."""
    types: list[list[Any]] = []
    return _split(skeleton, (), types), types


def join_types(tree: Any, types: Iterable[Sequence[Any]]) -> Any:
    """Return the skeleton of a `split_types` result; `tree` is changed. Types of an unknown kind are left out.

    Raises ValueError, KeyError, IndexError, TypeError or AttributeError: a type does not fit the tree.
    """
    root = [tree]
    pairs: dict[int, dict[Any, Any]] = {}  # the pairs of each "$dict" by key, by its id; `tree` keeps the ids alive
    # The deepest first: then no path leads through a value that has a type already.
    for path, kind, *details in sorted(types, key=lambda item: -len(item[0])):
        node: Any = root
        slot: Any = 0
        for key in path:
            node, slot = _slot(node[slot], key, pairs)
        value = node[slot]
        if kind == "tied":
            (first,) = details
            if not isinstance(first, str) or list(value) != ["$tensor"]:
                raise ValueError(f"{path} is not a tensor, but is tied to another one")
            value["$tied"] = first
        elif is_kind(kind):
            if untyped(value) is not value:
                raise ValueError(f"{path} has two types")
            node[slot] = {"$typed": [value, kind, *details]}
    return root[0]


def _slot(value: Any, key: Any, pairs: dict[int, dict[Any, Any]]) -> tuple[Any, Any]:
    """Return the container and the key or index in it of a child of a plain dict, list or tuple in a skeleton."""
    if type(key) not in (str, int):
        raise TypeError(f"{key!r} is neither a key nor an index")
    if isinstance(value, dict) and "$tuple" in value:
        value = value["$tuple"]
    if isinstance(value, dict) and "$dict" in value:
        if id(value) not in pairs:
            pairs[id(value)] = {pair[0]: pair for pair in value["$dict"]}
        return pairs[id(value)][key], 1
    if isinstance(value, list) and not 0 <= key < len(value):
        raise IndexError(f"a list of {len(value)} has no element {key}")
    return value, key


def _split(value: Any, path: tuple[Any, ...], types: list[list[Any]]) -> Any:
    if isinstance(value, list):
        return [_split(item, (*path, index), types) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        if "$tied" in value:
            types.append([list(path), "tied", value["$tied"]])
        return {"$tensor": value["$tensor"]}
    if "$typed" in value:
        plain, *described = value["$typed"]
        types.append([list(path), *described])
        return _split(plain, path, types)
    if "$tuple" in value:
        return {"$tuple": _split(value["$tuple"], path, types)}
    if "$dict" in value:
        return {"$dict": [[key, _split(item, (*path, key), types)] for key, item in value["$dict"]]}
    return {key: _split(item, (*path, key), types) for key, item in value.items()}
