"""A state tree - nested dicts, lists and tuples with tensors among the leaves - as JSON and a set of tensors.

No pickle: reading runs no code. What JSON cannot say is marked: `{"$tensor": NAME}`, `{"$tuple": [...]}`,
`{"$dict": [[KEY, VALUE], ...]}` for keys that are no strings, `{"$float": "nan"}`, `{"$bytes": HEX}`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.sizes import format_size

if TYPE_CHECKING:
    import torch

STATE_FORMAT: Final = 1
# What a reader believes: room for the names of two million tensors, or random states of 36,000 ranks. What is
# larger belongs into tensors, for values of JSON take some twenty times as much in memory.
MAX_STATE_BYTES: Final = 256 << 20
_MAX_DEPTH = 100
_MAX_PATH = 1 << 16


class _TensorCollector(dict[str, "torch.Tensor"]):
    """The tensors of a tree, and how many more values it may have."""

    nodes_left: float = math.inf


def flatten(state: Any, *, most_nodes: int | None = None) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the JSON skeleton of `state` and its tensors by dotted path. Numpy arrays become tensors.

    Args:
        state: a tree.
        most_nodes: values that it may have, one that hangs in several places counted in each: of a tree that comes
            from elsewhere, which may hold one list very often.

    Raises:
        ConfigError: a leaf can be stored neither as JSON nor as a tensor; names it and says what to do. Or the tree
            is nested absurdly deep, or has too many values.
    """
    tensors = _TensorCollector()
    if most_nodes is not None:
        tensors.nodes_left = most_nodes
    return _flatten(state, "", tensors, 0), dict(tensors)


def unflatten(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the state tree that `flatten` was given. Raises CorruptDataError when it is no skeleton."""
    return _unflatten(skeleton, tensors, 0)


def encode_state(skeleton: Any) -> bytes:
    """Return the bytes of a state object from the skeleton that `flatten` gave. Keys keep their order.

    Raises:
        ConfigError: they are more than anyone would read again.
    """
    raw = json.dumps({"format": STATE_FORMAT, "state": skeleton}, allow_nan=False).encode()
    if len(raw) > MAX_STATE_BYTES:
        raise ConfigError(
            f"what the state has beside its tensors is {format_size(len(raw))} of JSON, and may be "
            f"{format_size(MAX_STATE_BYTES)}; make tensors of long lists of numbers and of large bytes"
        )
    return raw


def decode_state(raw: bytes, version: str) -> Any:
    """Return the skeleton in a state object of `version`. Raises CorruptDataError, ConfigError (later format)."""
    try:
        stored = json.loads(raw)
        found = int(stored["format"])
        skeleton = stored["state"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptDataError(f"the state of {version} is damaged: {error!r}") from error
    if found > STATE_FORMAT:
        raise ConfigError(f"{version} has state format {found}; this datasvc reads up to {STATE_FORMAT}")
    return skeleton


def _flatten(value: Any, path: str, tensors: _TensorCollector, depth: int) -> Any:
    import torch

    if depth > _MAX_DEPTH:
        raise ConfigError(f"the state at {path[:60]}... is nested deeper than {_MAX_DEPTH} levels")
    tensors.nodes_left -= 1
    if tensors.nodes_left < 0 or (tensors.nodes_left < math.inf and len(path) > _MAX_PATH):
        raise ConfigError(f"the state has too many values, or too long names, at {path[:60]}...")
    if isinstance(value, np.ndarray):
        value = _from_numpy(value, path)
    if isinstance(value, torch.Tensor):
        name = path or "tensor"
        while name in tensors:  # {"a.b": x, "a": {"b": y}} has one path twice
            name += "'"
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, tuple):
        return {
            "$tuple": [_flatten(each, _join(path, index), tensors, depth + 1) for index, each in enumerate(value)]
        }
    if isinstance(value, list):
        return [_flatten(each, _join(path, index), tensors, depth + 1) for index, each in enumerate(value)]
    if isinstance(value, Mapping):
        return _flatten_mapping(value, path, tensors, depth)
    raise ConfigError(
        f"state value {path or '(root)'} is a {type(value).__name__}, which cannot be stored without pickle; "
        "store tensors, numbers, strings, lists, tuples and dicts of them, such as its state_dict()"
    )


def _flatten_mapping(value: Mapping[Any, Any], path: str, tensors: _TensorCollector, depth: int) -> Any:
    for key in value:
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise ConfigError(
                f"state key {key!r} at {path or '(root)'} is no string and no int; store it under str() of it"
            )
    flat = {key: _flatten(each, _join(path, key), tensors, depth + 1) for key, each in value.items()}
    if all(isinstance(key, str) and not key.startswith("$") for key in flat):
        return flat
    return {"$dict": [[key, each] for key, each in flat.items()]}


def _unflatten(value: Any, tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise CorruptDataError("this state is nested deeper than any that datasvc writes")
    deeper = depth + 1
    if isinstance(value, list):
        return [_unflatten(each, tensors, deeper) for each in value]
    if not isinstance(value, dict):
        return value
    marks = [key for key in value if key.startswith("$")]
    if not marks:
        return {key: _unflatten(each, tensors, deeper) for key, each in value.items()}
    try:
        ((mark, held),) = value.items()
        if mark == "$tensor":
            return tensors[held]
        if mark == "$tuple":
            return tuple(_unflatten(each, tensors, deeper) for each in held)
        if mark == "$dict":
            return {key: _unflatten(each, tensors, deeper) for key, each in held}
        if mark == "$float":
            return float(held)
        if mark == "$bytes":
            return bytes.fromhex(held)
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptDataError(f"this state's {marks[0]} is damaged: {error!r}") from error
    raise CorruptDataError(f"this state uses the unknown mark {mark!r}; it may need a later datasvc")


def _from_numpy(value: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    import torch

    try:
        native = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("="), copy=False))
        return torch.from_numpy(native.reshape(value.shape))
    except TypeError as error:
        raise ConfigError(f"state value {path or '(root)'} is an array of {value.dtype}: {error}") from error


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
