"""Converts a state tree, nested dicts, lists and tuples with tensors as leaves, to JSON and named tensors, and back.

The JSON tree is the skeleton: it has the name of each tensor in place of the tensor. No pickle is used, so reading a
state runs no code. A value that JSON cannot represent becomes a dict with a single key, its mark: `{"$tensor":
NAME}`, `{"$tuple": [...]}`, `{"$float": "nan"}` or `{"$bytes": HEX}`. `{"$dict": [[KEY, VALUE], ...]}` stands for a
dict in which some key is not a string, or begins with `$`. `container_types` describes the marks of values with a
type, such as ordered dicts, and of tied tensors; `value_types` has the types.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.extras import missing_package
from datasvc.models.tensors.container_types import join_types, mark_tied, split_types, untyped
from datasvc.models.tensors.value_types import describe, make
from datasvc.sizes import format_size
from datasvc.threads import collection_paused

if TYPE_CHECKING:
    import torch

STATE_FORMAT: Final = 2
# Written where a release that leaves out unknown types would restore wrong values: dicts in place of tensors.
_FORMAT_OF_SUBCLASSES: Final = 2
# Largest state object that is written or read: enough for the names of two million tensors, or for the random states
# of 36,000 ranks. The limit bounds memory: parsed JSON takes about twenty times as much memory as tensors.
MAX_STATE_BYTES: Final = 256 << 20
_MAX_DEPTH: Final = 100
_MAX_INT_BITS: Final = 1 << 13  # Python refuses to read longer decimal numbers than 4,300 digits
# Longest path in an untrusted tree. Each path repeats the keys above it, so a few long keys could take much memory.
_MAX_PATH_CHARS: Final = 1 << 16


class _TensorCollector(dict[str, "torch.Tensor"]):
    """Tensors of a tree by name.

    Attributes:
        values_left: how many more values the tree may have; infinite if the tree is not from an untrusted file.
        replace: see `flatten`.
        leaves: skeleton of each tensor, and the tensor.
    """

    values_left: float = math.inf
    replace: Callable[[Any, str], Any] | None = None
    leaves: list[tuple[dict[str, Any], torch.Tensor]]


@collection_paused()
def flatten(
    state: Any, *, max_nodes: int | None = None, replace: Callable[[Any, str], Any] | None = None
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the JSON skeleton of `state` and its tensors by dotted path. Numpy arrays become tensors.

    Args:
        state: state tree.
        max_nodes: maximum number of values, dicts and lists included. Set it for a tree from an untrusted file; it
            limits the lengths of paths too. None: no limit.
        replace: returns what is stored of each value of the tree, from the value and its path; None: the value.

    Raises:
        ConfigError: a leaf can be stored neither as JSON nor as a tensor (the message names the leaf); or the tree is
            nested too deep, or exceeds a limit for untrusted files.
    """
    tensors = _TensorCollector()
    tensors.leaves = []
    tensors.replace = replace
    if max_nodes is not None:
        tensors.values_left = max_nodes
    try:
        import torch  # noqa: F401 - `_flatten` imports it too
    except ModuleNotFoundError as error:
        raise missing_package(error, "saving a state") or error from error
    skeleton = _flatten(state, "", tensors, 0)
    mark_tied(tensors.leaves)
    return skeleton, dict(tensors)


def unflatten(skeleton: Any, tensors: Mapping[str, torch.Tensor], *, named: bool = True) -> Any:
    """Return the state tree of a `flatten` result, with `tensors` as they are: the caller ties tied tensors.

    `named`: whether values keep their types; else only those that `torch.load` reads by default, see
    `value_types.make`.

    Raises:
        CorruptDataError: `skeleton` is not a valid skeleton.
        ConfigError: the class of a tensor is not imported, or does not accept the stored values.
    """
    return _unflatten(skeleton, tensors, 0, named=named)


def dict_skeleton(parts: Mapping[Any, Any]) -> Any:
    """Return the skeleton of a dict from the skeletons of its values. Its keys are strings or integers."""
    # A key of a JSON object is a string, and one that starts with "$" marks an encoded value. So any other dict
    # becomes a list of pairs.
    if all(isinstance(key, str) and not key.startswith("$") for key in parts):
        return dict(parts)
    return {"$dict": [[key, part] for key, part in parts.items()]}


def dict_parts(skeleton: Any) -> dict[Any, Any] | None:
    """Return the skeletons of the values of a dict, by key; None if `skeleton` is that of another value."""
    skeleton = untyped(skeleton)
    if not isinstance(skeleton, dict):
        return None
    if "$dict" in skeleton:
        return dict(skeleton["$dict"])
    return None if any(key.startswith("$") for key in skeleton) else skeleton


def encode_state(skeleton: Any) -> bytes:
    """Return the bytes of a state object with a skeleton from `flatten`; the order of keys is kept.

    Raises:
        ConfigError: there are more than `MAX_STATE_BYTES`.
    """
    raw = json.dumps({"format": 1, "state": skeleton}, allow_nan=False).encode()
    # Most states have no types, and a search in the text costs less than a walk through the tree.
    if b'"$typed"' in raw or b'"$tied"' in raw:
        tree, types = split_types(skeleton)
        has_subclass = any(kind == "subclass" for _, kind, *_ in types)
        stored = {"format": _FORMAT_OF_SUBCLASSES if has_subclass else 1, "state": tree}
        raw = json.dumps({**stored, **({"types": types} if types else {})}, allow_nan=False).encode()
    if len(raw) > MAX_STATE_BYTES:
        raise ConfigError(
            f"the state without its tensors takes {format_size(len(raw))} of JSON; the limit is "
            f"{format_size(MAX_STATE_BYTES)}. Store long lists of numbers and large bytes as tensors"
        )
    return raw


def decode_state(raw: bytes, version: str) -> Any:
    """Return the skeleton in a state object of `version`.

    Raises:
        CorruptDataError: the bytes are not a state object.
        ConfigError: a later release of datasvc wrote the object.
    """
    try:
        stored = json.loads(raw)
        state_format = int(stored["format"])
        is_later = state_format > STATE_FORMAT
        skeleton = stored["state"]
        if "types" in stored and not is_later:
            skeleton = join_types(skeleton, stored["types"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptDataError(f"the state of {version} is damaged: {error!r}") from error
    if is_later:
        raise ConfigError(f"{version} has state format {state_format}; this datasvc reads up to {STATE_FORMAT}")
    return skeleton


def _flatten(value: Any, path: str, tensors: _TensorCollector, depth: int) -> Any:
    """Return the skeleton of the value at `path`, and add its tensors to `tensors`. For errors see `flatten`."""
    import torch

    if depth > _MAX_DEPTH:
        raise ConfigError(f"the state at {path[:60]}... is nested deeper than {_MAX_DEPTH} levels")
    # Count a value each time it occurs: an untrusted file may refer to one list many times.
    tensors.values_left -= 1
    is_untrusted = tensors.values_left < math.inf  # see `_TensorCollector`
    if tensors.values_left < 0 or (is_untrusted and len(path) > _MAX_PATH_CHARS):
        raise ConfigError(f"the state has too many values or too long paths of keys, at {path[:60]}...")
    if tensors.replace is not None:
        value = tensors.replace(value, path)
    if isinstance(value, np.ndarray):
        value = _from_numpy(value, path)
    plain_tensor = type(value) in (torch.Tensor, torch.nn.Parameter)
    described = None if plain_tensor else describe(value, path)
    if described is not None:
        return {"$typed": [_flatten(described.plain, path, tensors, depth), described.kind, *described.details]}
    if isinstance(value, torch.Tensor):
        if not plain_tensor and torch.nn.parameter.is_lazy(value):
            raise ConfigError(f"tensor {path!r} has no shape yet; run one batch through the model first")
        name = path or "tensor"
        # {"a.b": x, "a": {"b": y}} has the path a.b twice: the second tensor is named a.b'.
        while name in tensors:
            name += "'"
        tensors[name] = value
        leaf = {"$tensor": name}
        tensors.leaves.append((leaf, value))
        return leaf
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(float(value))}
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        raise ConfigError(
            f"state value {path or '(root)'} is an integer of over {_MAX_INT_BITS} bits; store its bytes"
        )
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if type(value) in (list, tuple):
        items = [_flatten(item, _join(path, index), tensors, depth + 1) for index, item in enumerate(value)]
        return {"$tuple": items} if type(value) is tuple else items
    # At the root a state may be any mapping: its values are what is stored.
    if type(value) is dict or (isinstance(value, Mapping) and not path):
        return _flatten_mapping(value, path, tensors, depth)
    raise ConfigError(
        f"state value {path or '(root)'} is a {type(value).__name__}, which cannot be stored without pickle; "
        "store tensors, numbers, strings, or lists, tuples and dicts of these, for example the value's state_dict(), "
        "or dict() of a mapping"
    )


def _flatten_mapping(value: Mapping[Any, Any], path: str, tensors: _TensorCollector, depth: int) -> Any:
    for key in value:
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise ConfigError(
                f"state key {key!r} at {path or '(root)'} is neither a string nor an int; convert it with str()"
            )
    return dict_skeleton({key: _flatten(item, _join(path, key), tensors, depth + 1) for key, item in value.items()})


def _unflatten(value: Any, tensors: Mapping[str, torch.Tensor], depth: int, *, named: bool) -> Any:
    """Return the state of a part of a skeleton, `depth` levels below the root. Raises CorruptDataError."""
    if depth > _MAX_DEPTH:
        raise CorruptDataError(f"the state is nested deeper than {_MAX_DEPTH} levels, which datasvc never writes")
    deeper = depth + 1
    if isinstance(value, list):
        return [_unflatten(item, tensors, deeper, named=named) for item in value]
    if not isinstance(value, dict):
        return value
    marks = [key for key in value if key.startswith("$")]
    if not marks:
        return {key: _unflatten(item, tensors, deeper, named=named) for key, item in value.items()}
    try:
        if marks == ["$tensor", "$tied"]:
            return tensors[value["$tensor"]]
        # Raises ValueError if the dict has other keys too.
        ((mark, content),) = value.items()
        if mark == "$tensor":
            return tensors[content]
        if mark == "$tuple":
            return tuple(_unflatten(item, tensors, deeper, named=named) for item in content)
        if mark == "$dict":
            return {key: _unflatten(item, tensors, deeper, named=named) for key, item in content}
        if mark == "$typed":
            plain, kind, *details = content
            # A type around a type would make the tree deeper without being counted: take the plain value inside.
            plain = _unflatten(untyped(plain), tensors, depth, named=named)
            return make(kind, plain, details, is_exported=not named)
        if mark == "$float":
            return float(content)
        if mark == "$bytes":
            return bytes.fromhex(content)
    except ConfigError:  # a ValueError too
        raise
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise CorruptDataError(f"the value of {marks[0]} in the state is damaged: {error!r}") from error
    raise CorruptDataError(f"the state uses the unknown mark {mark!r}; it may need a later release of datasvc")


def _from_numpy(value: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    import torch

    if type(value) not in (np.ndarray, np.memmap):
        raise ConfigError(
            f"state value {path or '(root)'} is a {type(value).__name__}, of which only elements could be stored; "
            "store its parts as arrays, such as the data and the mask of a masked array"
        )
    try:
        # torch accepts neither a foreign byte order nor negative strides. `ascontiguousarray` makes an array of one
        # element from a scalar, so restore the shape.
        native = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("="), copy=False))
        return torch.from_numpy(native.reshape(value.shape))
    except TypeError as error:
        raise ConfigError(f"state value {path or '(root)'} is an array of {value.dtype}: {error}") from error


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
