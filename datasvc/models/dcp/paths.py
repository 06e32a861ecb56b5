"""Paths in the state tree, for the modules that save and load sharded checkpoints.

Torch's planner flattens the tree to a dict. The path of a key of this dict leads from the root of the tree to the
value: a tuple of dict keys and list indices. The planner's data maps each key to its path; it is None if the planner
did not flatten the tree. Paths in a stored version are checked before a tree is built from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from datasvc.errors import CorruptDataError
from datasvc.models.tensors.container_types import untyped

Path = tuple[str | int, ...]


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
