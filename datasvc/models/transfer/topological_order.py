"""Which model versions go first: those that others were made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from datasvc.models.registry.registry import ModelVersion, parse_version
from datasvc.repository import Repository, Resolved


def order_by_descent(parents: Mapping[Resolved, Sequence[Resolved]]) -> list[Resolved]:
    """Return the versions, each once, parents before what was made from them, else by name and number.

    Args:
        parents: of each version; those that are no version of the mapping themselves do not count.
    """
    ordered: dict[Resolved, None] = {}
    for version in sorted(parents, key=_place):
        # A stack of its own: a history may be longer than Python's.
        waiting, seen = [version], {version}
        while waiting:
            ahead = [
                each for each in parents[waiting[-1]] if each in parents and each not in seen and each not in ordered
            ]
            if ahead:
                waiting.append(ahead[0])
                seen.add(ahead[0])
            else:
                ordered[waiting.pop()] = None
    return list(ordered)


def read_parents(
    repository: Repository,
    versions: Iterable[Resolved],
    content: Callable[[Resolved], Mapping[str, Any]],
    *,
    with_ancestors: bool,
) -> dict[Resolved, list[Resolved]]:
    """Return what versions were made from, as far as it is there still.

    Args:
        repository: where they are.
        versions: of models.
        content: returns what the entry of a version says.
        with_ancestors: their parents, too, and so on.

    Raises:
        CorruptDataError, UnavailableError: see `Log.read`.
    """
    living: dict[str, frozenset[int]] = {}
    parents: dict[Resolved, list[Resolved]] = {}
    wanted = list(versions)
    while wanted:
        parents |= {version: _parents(repository, version, content(version), living) for version in wanted}
        further = {parent for version in wanted for parent in parents[version]} if with_ancestors else set()
        wanted = sorted(further - parents.keys(), key=_place)
    return parents


def _parents(
    repository: Repository, version: Resolved, entry: Mapping[str, Any], living: dict[str, frozenset[int]]
) -> list[Resolved]:
    named = map(parse_version, ModelVersion(version.name, version.version, (), entry).parents)
    found = []
    for name, number in filter(None, named):
        if name not in living:
            living[name] = frozenset(repository.living("models", name))
        if number in living[name]:
            found.append(Resolved("models", name, number))
    return found


def _place(version: Resolved) -> tuple[str, int]:
    return version.name, version.version
