"""Whether the state tree that came with foreign tensors is one: looked at before anything of it is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.models.tensors.state_tree import encode_state, unflatten


class _TensorPlaceholder:
    """Stands in for a tensor."""

    def __init__(self, name: str) -> None:
        self.name = name


def check_skeleton(skeleton: Any, names: Iterable[str], location: str) -> None:
    """Make sure that a state can be stored and restored, with every tensor in one place of it.

    Raises:
        CorruptDataError: it is not a skeleton of `state_tree.flatten`, or tensors are missing or repeated in it.
        ConfigError: it cannot be stored: a number is no JSON, or too large.
    """
    leaves = {name: _TensorPlaceholder(name) for name in names}
    try:
        tree = unflatten(skeleton, leaves)  # type: ignore[arg-type] # never looked at there
    except (ArithmeticError, CorruptDataError, RecursionError) as error:
        raise CorruptDataError(f"{location}: {error}") from error
    placed = Counter(leaf.name for leaf in _leaves(tree))
    for name in leaves:
        if placed[name] != 1:
            raise CorruptDataError(f"{location}: its state has tensor {name!r} {placed[name]} times, not once")
    try:
        encode_state(skeleton)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{location}: its state cannot be stored: {error}") from error


def _leaves(value: Any) -> Iterator[_TensorPlaceholder]:
    if isinstance(value, _TensorPlaceholder):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(each)
