"""Ancestors of the versions of a data set, along `parent` and `merged` of their entries.

Numbers of versions are a topological order: a version has a higher number than what it continues.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.heads import parents_of

_OURS, _THEIRS, _STALE = 1, 2, 4


def find_common_ancestors(repository: Repository, ours: Resolved, theirs: Resolved) -> list[Resolved]:
    """Return the newest common ancestors of two versions of a data set, newest first; [] if there are none.

    A version is an ancestor of itself. A common ancestor that is an ancestor of another one is left out. There are
    several after merges in both directions that did not include each other. Only entries that are newer than the
    oldest result are read. The method is that of `git merge-base`.

    Raises:
        CorruptDataError, ConfigError, UnavailableError: see `Log.read`.
    """
    assert ours.name == theirs.name, (ours, theirs)
    read = repository.positions(ours.name)
    sides: dict[int, int] = {ours.version: _OURS}
    sides[theirs.version] = sides.get(theirs.version, 0) | _THEIRS
    pending = [-number for number in sides]
    heapq.heapify(pending)
    common = []
    # All descendants of the highest number were looked at, so its sides are complete.
    while pending:
        number = -heapq.heappop(pending)
        flags = sides[number]
        if flags == _OURS | _THEIRS:
            common.append(Resolved("datasets", ours.name, number))
            flags |= _STALE
        if flags & _STALE and all(sides[-other] & _STALE for other in pending):
            break  # only ancestors of the results are left: they may be lost, and are not read
        for parent in parents_of(read, number):
            if parent not in sides:
                heapq.heappush(pending, -parent)
            sides[parent] = sides.get(parent, 0) | flags
    return common


def ancestors_of(repository: Repository, version: Resolved) -> Iterator[int]:
    """Yield the numbers of a version and of all its ancestors, descending; for errors, see `Log.read`."""
    read = repository.positions(version.name)
    pending, seen = [-version.version], {version.version}
    while pending:
        number = -heapq.heappop(pending)
        yield number
        for parent in set(parents_of(read, number)) - seen:
            seen.add(parent)
            heapq.heappush(pending, -parent)
