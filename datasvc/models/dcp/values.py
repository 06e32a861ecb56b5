"""Encodes and decodes the values of a sharded state that are not tensors, without storing pickles.

Torch's planners pickle each of these values on save, and unpickle it on load. Here, the value itself is stored as
JSON. On load, it is decoded from JSON and pickled in memory for the planner, so stored bytes are never unpickled.

Bytes in a planner's own format are an exception: the planner that reads them may execute code from them. They are
returned only if the caller trusts the version, see `DcpReader(planner_bytes=True)`.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner, WriteItem
from torch.distributed.tensor import DTensor

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.tensors.container_types import untyped
from datasvc.models.tensors.state_tree import dict_skeleton, flatten

Path = tuple[str | int, ...]


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


# Torch's planner flattens the tree to a dict. The path of a key of this dict leads from the root of the tree to the
# value: a tuple of dict keys and list indices. The planner's data maps each key to its path; it is None if the
# planner did not flatten the tree. Paths in a stored version are checked before a tree is built from them.


def check_paths(planner_data: Any) -> Mapping[str, Path] | None:
    """Return a planner's data after a check of its form: None, or a dict with a path for each key.

    Raises ValueError: the data has another form. The caller turns this into an error of its own.
    """
    if planner_data is None:
        return None
    if not isinstance(planner_data, Mapping):
        raise ValueError(f"it is a {type(planner_data).__name__}; expected a dict with a path for each key")  # noqa: TRY004 - one class for every wrong form
    for key, path in planner_data.items():
        if not isinstance(key, str) or not isinstance(path, tuple) or not path or not all(map(_is_step, path)):
            raise ValueError(f"for {key!r} it has {path!r}; expected a path of dict keys and list indices")
    return dict(planner_data)


def check_reach(skeleton: Any, paths: Iterable[Path]) -> None:
    """Raise CorruptDataError unless all paths exist in the skeleton of a state.

    Without this check, a tree built from a path with a huge list index would take memory for elements that do not
    exist.
    """
    # Cache the children by id of their parent, so that a dict with many keys is decoded once, and not once per path.
    # The ids are unique, because `skeleton` keeps all parents alive.
    children: dict[int, Any] = {}
    for path in paths:
        part = skeleton
        for depth, key in enumerate(path):
            if id(part) not in children:
                children[id(part)] = _children(part, path[:depth])
            part = _child_at(children[id(part)], key, path)


def find(skeleton: Any, path: Path) -> Any:
    """Return the part of a state's skeleton at `path`. Raises CorruptDataError: the path does not exist."""
    part = skeleton
    for depth, key in enumerate(path):
        part = _child_at(_children(part, path[:depth]), key, path)
    return part


def path_of(planner_data: Mapping[str, Path] | None, key: str) -> Path:
    """Return the path of the value of `key` in the state tree; without planner data, the key itself."""
    return (planner_data or {}).get(key, (key,))


def _is_step(step: Any) -> bool:
    return type(step) is str or (type(step) is int and step >= 0)


def _children(part: Any, path: Path) -> Any:
    """Return the children of a part of a skeleton, as a dict or a list; any other result means no children."""
    part = untyped(part)
    if not isinstance(part, dict):
        return part
    if "$dict" not in part:
        # A key that begins with "$" marks an encoded value, such as a tensor or a tuple; no path leads into it.
        return None if any(name.startswith("$") for name in part) else part
    try:
        return {str(name): child for name, child in part["$dict"]}
    except (TypeError, ValueError) as error:
        raise CorruptDataError(f"the state is damaged at {_dotted(path)}: {error!r}") from error


def _child_at(children: Any, key: Any, path: Path) -> Any:
    """Return the child with a key. Raises CorruptDataError if there is none; the message names `path`."""
    if not isinstance(children, dict | list):
        raise CorruptDataError(f"the state has nothing at {_dotted(path)}: the path leads through a value")
    try:
        return children[key]
    except (KeyError, IndexError, TypeError) as error:
        raise CorruptDataError(f"the state has nothing at {_dotted(path)}: {error!r}") from error


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))
