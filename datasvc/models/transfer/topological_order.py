"""Sorts versions topologically, so that a transfer commits parents before their children."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

from datasvc.models.registry.registry import ModelVersion, parse_version
from datasvc.repository import Kind, Repository, Resolved

_BY_NAME: Final = attrgetter("name", "version")


def sort_topologically(parents: Mapping[Resolved, Sequence[Resolved]]) -> list[Resolved]:
    """Return the versions with parents before children; ties are broken by name and number.

    `parents` has the parents of each version. A parent is ignored if it is not a key, or if it closes a cycle.
    """
    ordered: dict[Resolved, None] = {}  # an ordered set
    for version in sorted(parents, key=_BY_NAME):
        # Use an explicit stack, because a history may be longer than Python's recursion limit.
        stack, seen = [version], {version}
        while stack:
            unvisited = [
                parent
                for parent in parents[stack[-1]]
                if parent in parents and parent not in seen and parent not in ordered
            ]
            if unvisited:
                stack.append(unvisited[0])
                seen.add(unvisited[0])
            else:
                ordered[stack.pop()] = None
    return list(ordered)


def read_parents(
    repository: Repository,
    versions: Iterable[Resolved],
    content: Callable[[Resolved], Mapping[str, Any]],
    *,
    with_ancestors: bool,
) -> dict[Resolved, list[Resolved]]:
    """Return the parents of each version, and of its ancestors if `with_ancestors`. For errors, see `Log.read`.

    `content` returns the content of a version's entry. Parents that do not exist or were removed are left out.
    """
    living: dict[tuple[Kind, str], frozenset[int]] = {}  # of each data set and model: the versions not removed
    parents: dict[Resolved, list[Resolved]] = {}
    pending = list(versions)
    while pending:
        parents |= {version: _parents(repository, version, content(version), living) for version in pending}
        older = {parent for version in pending for parent in parents[version]} if with_ancestors else set()
        pending = sorted(older - parents.keys(), key=_BY_NAME)
    return parents


def _parents(
    repository: Repository,
    version: Resolved,
    entry: Mapping[str, Any],
    living: dict[tuple[Kind, str], frozenset[int]],
) -> list[Resolved]:
    """Return the parents of a version that are not removed; `living` caches the listing of each name."""
    parents = []
    references = ModelVersion(version.name, version.version, (), entry).parents  # its tags are not needed: ()
    # `parse_version` returns None for a reference without a version number.
    for name, number in filter(None, map(parse_version, references)):
        # List a name once, not once for each of its versions.
        key = version.kind, name
        if key not in living:
            living[key] = frozenset(repository.living(*key))
        if number in living[key]:
            parents.append(Resolved(version.kind, name, number))
    return parents
