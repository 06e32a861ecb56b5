"""Where in the state tree a planner took the value of a key from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from datasvc.errors import CorruptDataError

Path = tuple[str | int, ...]


def check_paths(planner_data: Any) -> Mapping[str, Path] | None:
    """Return what a planner noted where it is what torch's planners note, which they and we build trees by.

    Raises:
        ValueError: it is neither None nor the path of each key, of names and of places in lists; names the key.
    """
    if planner_data is None:
        return None
    if not isinstance(planner_data, Mapping):
        raise ValueError(f"it is a {type(planner_data).__name__}, not the path of each key")  # noqa: TRY004 - as below
    for key, path in planner_data.items():
        if not isinstance(key, str) or not isinstance(path, tuple) or not path or not all(map(_is_step, path)):
            raise ValueError(f"for {key!r} it has {path!r}, which is no path in a state")
    return planner_data


def check_reach(skeleton: Any, paths: Iterable[Path]) -> None:
    """Raise CorruptDataError where a path leads out of a state's skeleton.

    Trees are built by paths: a place in a list that is stored nowhere would cost memory that nothing bears out.
    """
    children: dict[int, Any] = {}
    for path in paths:
        part = skeleton
        for depth, key in enumerate(path):
            if id(part) not in children:
                children[id(part)] = _children(part, path[:depth])
            part = _step(children[id(part)], key, path)


def find(skeleton: Any, path: Path) -> Any:
    """Return the part of a state's skeleton that lies at `path`. Raises CorruptDataError when there is none."""
    part = skeleton
    for depth, key in enumerate(path):
        part = _step(_children(part, path[:depth]), key, path)
    return part


def path_of(planner_data: Mapping[str, Path] | None, key: str) -> Path:
    """Return where in the state tree the value of `key` lies: where a planner that flattened took it from."""
    return (planner_data or {}).get(key, (key,))


def _is_step(step: Any) -> bool:
    return type(step) is str or (type(step) is int and step >= 0)


def _children(part: Any, path: Path) -> Any:
    """Return what lies in a part of a skeleton by key."""
    if not isinstance(part, dict):
        return part
    if "$dict" not in part:
        return None if any(name.startswith("$") for name in part) else part  # what is marked so is a value
    try:
        return {str(name): each for name, each in part["$dict"]}
    except (TypeError, ValueError) as error:
        raise CorruptDataError(f"the state is damaged at {_shown(path)}: {error!r}") from error


def _step(children: Any, key: Any, path: Path) -> Any:
    if not isinstance(children, dict | list):
        raise CorruptDataError(f"the state has nothing at {_shown(path)}: a value lies on the way")
    try:
        return children[key]
    except (KeyError, IndexError, TypeError) as error:
        raise CorruptDataError(f"the state has nothing at {_shown(path)}: {error!r}") from error


def _shown(path: Path) -> str:
    return ".".join(map(str, path))
