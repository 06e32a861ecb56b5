"""What is no tensor in a state that torch's planners save: JSON in the state tree, where they would pickle it.

A planner of torch makes a pickle of each such value and unpickles it on load. Here the value itself is stored, and on
load the planner gets a pickle made just then, in memory, from what JSON said: no stored byte is ever unpickled.
Bytes of a planner's own format are the exception. What they do in the planner that gets them nobody here can tell, so
they are handed out only to a caller who says that the version is to be trusted with it.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner, WriteItem
from torch.distributed.tensor import DTensor

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.dcp.paths import Path, find
from datasvc.models.tensors.state_tree import flatten


class EncodedValue(NamedTuple):
    """A value as it is stored.

    Attributes:
        skeleton: JSON, as `state_tree.flatten` gives it.
        tensors: that lie in it, by the names that the skeleton gives them.
        is_opaque: whether it is bytes that only the planner which made them understands.
    """

    skeleton: Any
    tensors: Mapping[str, torch.Tensor]
    is_opaque: bool


def encode_value(planner: SavePlanner, item: WriteItem) -> EncodedValue:
    """Return what to store for a byte item of a save plan.

    Raises:
        ConfigError: the value cannot be stored without pickle; names its key and says what to do.
    """
    key = item.index.fqn
    value, is_opaque = _value(planner, item)
    if is_opaque:
        return EncodedValue({"$bytes": value.hex()}, {}, is_opaque=True)
    skeleton, tensors = flatten({key: value})
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            raise ConfigError(
                f"{name!r} is a sharded tensor inside a {type(value).__name__}, which planners do not look into; "
                "put it into a dict or a list"
            )
    return EncodedValue(find(skeleton, (key,)), tensors, is_opaque=False)


def decode_opaque(value: Any, key: str, planner: LoadPlanner, *, is_wanted: bool) -> io.BytesIO:
    """Return bytes that a planner made itself, for the planner that understands them.

    Args:
        value: what is stored.
        key: of it.
        planner: that will get them.
        is_wanted: whether the caller asked for such bytes. No look at them tells what the planner would do with them:
            pickles have text forms, and planners wrap others.

    Raises:
        ConfigError: nobody asked for them; or torch's own planner, which would unpickle them, is to read them.
        CorruptDataError: they are no bytes.
    """
    if isinstance(planner, DefaultLoadPlanner):
        raise ConfigError(
            f"{key!r} holds bytes that a planner of its own wrote, and {type(planner).__name__} would unpickle them; "
            "load with the planner that goes with it and Reader(planner_bytes=True), or leave the key out"
        )
    if not is_wanted:
        raise ConfigError(
            f"{key!r} holds bytes that a planner of its own wrote, and {type(planner).__name__} may run what they "
            "say; where you trust whoever wrote them, load with Reader(planner_bytes=True), else leave the key out"
        )
    if not isinstance(value, bytes):
        raise CorruptDataError(f"{key!r} is said to be a planner's own bytes, but is a {type(value).__name__}")
    return io.BytesIO(value)


def wrap_value(value: Any) -> io.BytesIO:
    """Return a value as torch's planners expect it."""
    wrapped = io.BytesIO()
    torch.save(value, wrapped)
    wrapped.seek(0)
    return wrapped


def nest(leaves: Mapping[Path, Any]) -> Any:
    """Return the skeleton of a state tree from the skeletons of its leaves, by path; ints index lists.

    Raises:
        ConfigError: a path leads through a leaf.
    """
    root: dict[str | int, Any] = {}
    for path, skeleton in leaves.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
            if isinstance(node, _ValueLeaf):
                raise ConfigError(f"the planner puts {path} below another value; give the two different keys")
        if path[-1] in node:
            raise ConfigError(f"the planner puts two values at {path}; give them different keys")
        node[path[-1]] = _ValueLeaf(skeleton)
    return _encode_node(root)


class _ValueLeaf(NamedTuple):
    skeleton: Any


def _encode_node(node: dict[str | int, Any] | _ValueLeaf) -> Any:
    if isinstance(node, _ValueLeaf):
        return node.skeleton
    children = {key: _encode_node(each) for key, each in node.items()}
    if children and all(isinstance(key, int) for key in children):
        # A list may have elements in which planners find nothing: empty dicts.
        return [children.get(index) for index in range(max(map(int, children)) + 1)]
    if all(isinstance(key, str) and not key.startswith("$") for key in children):
        return children
    return {"$dict": [[key, each] for key, each in children.items()]}


def _value(planner: SavePlanner, item: WriteItem) -> tuple[Any, bool]:
    """Return the value of a byte item, and whether it is a planner's own bytes."""
    kind = type(planner)
    if isinstance(planner, DefaultSavePlanner) and _leaves_values_as_they_are(type(planner)):
        return planner.lookup_object(item.index), False
    made = planner.resolve_data(item)
    if not isinstance(made, io.BytesIO):
        raise ConfigError(f"{kind.__name__} made a {type(made).__name__} of the value {item.index.fqn!r}, not bytes")
    raw = made.getvalue()
    if not _is_pickle(raw):
        return raw, True
    try:
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True), False
    except Exception as error:
        raise ConfigError(
            f"{kind.__name__} pickled the value {item.index.fqn!r}, which cannot be stored without: {error}; store "
            "tensors, numbers, strings, lists, tuples and dicts of them"
        ) from error


def _leaves_values_as_they_are(kind: type[DefaultSavePlanner]) -> bool:
    default = DefaultSavePlanner
    return kind.resolve_data is default.resolve_data and kind.transform_object is default.transform_object


def _is_pickle(raw: bytes) -> bool:
    """Return whether bytes look like what torch.save or pickle writes."""
    if raw.startswith(b"\x80"):
        return True
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    except zipfile.BadZipFile:
        return False
