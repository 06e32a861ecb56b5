"""Encodes and decodes the values of a sharded state that are not tensors, without storing pickles.

Torch's planners pickle each of these values on save, and unpickle it on load. Here, the value itself is stored as
JSON. On load, it is decoded from JSON and pickled in memory for the planner, so stored bytes are never unpickled.

Bytes in a planner's own format are an exception: the planner that reads them may execute code from them. They are
returned only if the caller trusts the version, see `DcpReader(planner_bytes=True)`.
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
from datasvc.models.tensors.state_tree import dict_skeleton, flatten


class EncodedValue(NamedTuple):
    """Stored form of a value.

    Attributes:
        skeleton: skeleton of the value, see `flatten`.
        tensors: tensors inside the value, by name.
        is_opaque: whether the value is bytes in a format that only its planner can read.
    """

    skeleton: Any
    tensors: Mapping[str, torch.Tensor]
    is_opaque: bool


def encode_value(planner: SavePlanner, item: WriteItem) -> EncodedValue:
    """Return the stored form of a value in a save plan, an item of type BYTE_IO.

    Raises ConfigError: the value can be stored only with pickle, or contains a sharded tensor.
    """
    key = item.index.fqn
    value, is_opaque = _resolve_value(planner, item)
    if is_opaque:
        # The same skeleton as `flatten` returns for bytes.
        return EncodedValue({"$bytes": value.hex()}, {}, is_opaque=True)
    # Put the value into a dict with its key, so that the names of its tensors begin with the key.
    skeleton, tensors = flatten({key: value})
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            raise ConfigError(
                f"{name!r} is a sharded tensor inside a {type(value).__name__}; planners can shard only tensors in "
                "dicts and lists: put it into a dict or a list"
            )
    return EncodedValue(find(skeleton, (key,)), tensors, is_opaque=False)


def decode_opaque(value: Any, key: str, planner: LoadPlanner, *, is_trusted: bool) -> io.BytesIO:
    """Return the bytes that a planner stored in its own format.

    Args:
        value: decoded value; bytes, if the version is valid.
        key: key of the value, for messages.
        planner: planner that will read the bytes.
        is_trusted: whether the caller trusts the author of the bytes. No check can show that the bytes are safe: a
            pickle may be plain text, or inside another format, and `_is_pickle` recognises neither.

    Raises:
        ConfigError: the caller does not trust the author; or `planner` is torch's default planner, which would
            unpickle the bytes.
        CorruptDataError: the value is not bytes.
    """
    if isinstance(planner, DefaultLoadPlanner):
        raise ConfigError(
            f"{key!r} holds bytes that a custom planner wrote, and {type(planner).__name__} would unpickle them; "
            "load with that custom planner and DcpReader(planner_bytes=True), or leave the key out"
        )
    if not is_trusted:
        raise ConfigError(
            f"{key!r} holds bytes that a custom planner wrote, and {type(planner).__name__} may execute code from "
            "them; if you trust their author, load with DcpReader(planner_bytes=True), otherwise leave the key out"
        )
    if not isinstance(value, bytes):
        raise CorruptDataError(f"{key!r} is marked as bytes of a custom planner, but is a {type(value).__name__}")
    return io.BytesIO(value)


def wrap_value(value: Any) -> io.BytesIO:
    """Return a value in the form that torch's planners expect: the bytes of `torch.save`."""
    wrapped = io.BytesIO()
    torch.save(value, wrapped)
    wrapped.seek(0)
    return wrapped


def nest(leaves: Mapping[Path, Any]) -> Any:
    """Build the skeleton of a state tree.

    `leaves` maps the path of each leaf to its skeleton. An integer in a path is an index of a list.

    Raises ConfigError: two leaves have the same path, or the path of one leads through another.
    """
    root: dict[str | int, Any] = {}
    for path, skeleton in leaves.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
            if isinstance(node, _ValueLeaf):
                raise ConfigError(f"the planner puts {path} below another value; give the two values different keys")
        if path[-1] in node:
            raise ConfigError(f"the planner puts two values at {path}; give them different keys")
        node[path[-1]] = _ValueLeaf(skeleton)
    return _encode_node(root)


class _ValueLeaf(NamedTuple):
    """A leaf of the tree. Without this class, a skeleton that is a dict would look like a node of the tree."""

    skeleton: Any


def _encode_node(node: dict[str | int, Any] | _ValueLeaf) -> Any:
    if isinstance(node, _ValueLeaf):
        return node.skeleton
    children = {key: _encode_node(child) for key, child in node.items()}
    if children and all(isinstance(key, int) for key in children):
        # An index may be absent: an element without leaves, such as an empty dict, has no path. It becomes None.
        return [children.get(index) for index in range(max(map(int, children)) + 1)]
    return dict_skeleton(children)


def _resolve_value(planner: SavePlanner, item: WriteItem) -> tuple[Any, bool]:
    """Return the value of an item, and whether it is bytes in the planner's own format."""
    planner_class = type(planner)
    # `resolve_data` of torch's planners pickles the value. If it does nothing else, take the value itself.
    if isinstance(planner, DefaultSavePlanner) and _keeps_values(type(planner)):
        return planner.lookup_object(item.index), False
    resolved = planner.resolve_data(item)
    if not isinstance(resolved, io.BytesIO):
        raise ConfigError(
            f"{planner_class.__name__} returned a {type(resolved).__name__} for the value {item.index.fqn!r}; "
            "expected BytesIO"
        )
    raw = resolved.getvalue()
    if not _is_pickle(raw):
        return raw, True
    try:
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True), False
    except Exception as error:
        raise ConfigError(
            f"{planner_class.__name__} pickled the value {item.index.fqn!r}, which cannot be stored without pickle: "
            f"{error}; save tensors, numbers, strings, and lists, tuples and dicts of them instead"
        ) from error


def _keeps_values(planner_class: type[DefaultSavePlanner]) -> bool:
    """Return whether a planner class saves values as they are, without a transformation of its own."""
    default = DefaultSavePlanner
    resolves_as_default = planner_class.resolve_data is default.resolve_data
    return resolves_as_default and planner_class.transform_object is default.transform_object


def _is_pickle(raw: bytes) -> bool:
    """Return whether bytes have the form of the output of `torch.save` or `pickle`."""
    # A pickle of protocol 2 or later begins with this byte.
    if raw.startswith(b"\x80"):
        return True
    try:
        # torch.save writes a zip archive with a pickle named data.pkl.
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    except zipfile.BadZipFile:
        return False
