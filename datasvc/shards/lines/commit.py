"""Commits the next version of a line of a data set, of the main line or of a branch; the ancestors of versions.

All lines have one log, so a commit to another line takes the number that a writer wanted. Then the entry gets the
next number, and its content stays. Only a commit to the same line makes the writer build its content again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from datasvc.errors import ConfigError, ConflictError, CorruptDataError
from datasvc.repository import Entry, Repository, Resolved
from datasvc.repository.branching import continue_line
from datasvc.repository.logs.branches import branch_of
from datasvc.repository.logs.heads import parents_of
from datasvc.repository.logs.references import LineName, is_name, parse_reference
from datasvc.repository.objects.objects import parse_digest
from datasvc.repository.resolved import warn_unreadable

Build = Callable[[Resolved | None], Mapping[str, Any]]
"""Returns the content of the entry that continues a version; None: the line has no version that is not removed."""
_OURS, _THEIRS, _STALE = 1, 2, 4


def commit_on_line(
    repository: Repository, line: LineName, build: Build, *, continues: bool = True, head: int | None = None
) -> Entry:
    """Commit the next version of a line; on a branch, its entry records the version that it continues as `parent`.

    Args:
        repository: the repository that stores the data set.
        line: what to commit to.
        build: returns the content of the entry; it is called again for each other version to continue.
        continues: whether the new version has samples of the one before. If not, it may begin a new data set under a
            name that a renamed one had.
        head: number of the newest version of all lines, see `Log.append`.

    Raises:
        NotFoundError: there is no such branch.
        ConflictError: the data set was renamed, and has no version of this name since then; or see `Log.append`.
        CorruptDataError: see `continue_line`.
    """
    built: dict[Resolved | None, Mapping[str, Any]] = {}

    def build_entry(newest: int) -> Mapping[str, Any]:
        continued = continue_line(repository, line, newest)
        if continues or line.branch is not None:
            check_not_renamed(repository, continued.main)
        parent = continued.parent
        if parent not in built:
            built.clear()  # the content may be large
            built[parent] = build(parent)
        on_branch = {} if line.branch is None else {"parent": str(parent)}
        return {**built[parent], **on_branch, **continued.fields}

    return repository.versions("datasets", line.name).append(build_entry, head=head)


def head_of_line(repository: Repository, line: LineName, newest: int) -> Resolved | None:
    """Return the head of a line up to entry `newest`; None if it has no version. For errors, see `commit_on_line`."""
    continued = continue_line(repository, line, newest)
    check_not_renamed(repository, continued.main)
    return continued.parent


def find_line(repository: Repository, ref: str) -> tuple[Resolved, LineName]:
    """Return the version that a reference resolves to, and the line that its next version is committed to.

    `NAME@BRANCH` means the branch. Any other reference means the line that the version itself is on.

    Raises:
        ConfigError, NotFoundError: see `Repository.resolve`.
        CorruptDataError, UnavailableError: see `Repository.entry`.
    """
    resolved = repository.resolve("datasets", ref)
    reference = parse_reference(str(ref))
    if reference.tag is not None and not reference.moves_back and reference.tag in repository.branches(resolved.name):
        return resolved, LineName(resolved.name, reference.tag)
    if reference.version is None and reference.tag is None:
        return resolved, LineName(resolved.name)
    return resolved, LineName(resolved.name, branch_of(repository.entry(resolved).content))


def check_newest(base: Resolved, line: LineName, newest: Resolved | None) -> None:
    """Raise ConflictError if a version is not the head of its line, which only can be continued."""
    if base != newest:
        raise ConflictError(
            f"{base} is not the newest version, which is {newest}; only the newest version can be continued: give "
            f"{line} or {newest}"
        )


def check_not_renamed(repository: Repository, main: Resolved | None) -> None:
    """Raise ConflictError if the newest version of the main line records that the data set was renamed."""
    entries, _ = repository.versions("datasets", main.name).try_entries([main.version]) if main else ([], {})
    if main is not None and entries and (new_name := renamed_to(entries[0])):
        raise ConflictError(f"{main.name} was renamed to {new_name}; use the new name")


def renamed_to(entry: Entry) -> str | None:
    """Return the new name if `entry` records that the data set was renamed, otherwise None."""
    change = entry.content.get("change")
    if not isinstance(change, Mapping) or change.get("kind") != "rename":
        return None
    return str(change.get("to"))


# `datasvc ls` needs no more. This module imports neither Arrow nor NumPy, which take longer to import than a list of
# data sets takes to read.


def summarize_datasets(repository: Repository) -> list[dict[str, Any]]:
    """Return the newest version of every data set as JSON values.

    They are name, version, samples, bytes, created, tags, and branches with their heads. See `newest_entries` for
    what is left out, and for errors.
    """
    return [
        {
            "name": resolved.name,
            "version": resolved.version,
            "samples": sum(split["samples"] for split in entry.content["splits"].values()),
            "bytes": sum(split["bytes"] for split in entry.content["splits"].values()),
            "created": entry.content.get("created"),
            "tags": dict(state.tags),
            "branches": dict(state.branches),
        }
        for resolved, entry in newest_entries(repository)
        for state in (repository.state("datasets", resolved.name),)
    ]


def newest_entries(repository: Repository) -> list[tuple[Resolved, Entry]]:
    """Return the newest version of every data set, of its main line, with its entry, sorted by name.

    A data set whose newest version cannot be read is left out with an `UnreadableVersionWarning`. There is no warning
    for one whose versions were all marked as lost (`datasvc mark-lost`).

    Raises:
        UnavailableError: the store does not respond.
    """
    found = []
    for name in filter(is_name, repository.storage.list("datasets")):
        try:
            newest = repository.newest("datasets", name)
        except (CorruptDataError, ConfigError) as error:
            warn_unreadable(Resolved("datasets", name, repository.versions("datasets", name).head()), error)
            continue
        for entry in repository.readable_entries("datasets", name, [newest.version]) if newest else ():
            resolved = Resolved("datasets", name, entry.number)
            if renamed_to(entry):
                continue  # the data set is listed by its new name
            try:
                check_splits(entry.content, resolved)
            except CorruptDataError as error:
                warn_unreadable(resolved, error)
            else:
                found.append((resolved, entry))
    return found


def check_splits(content: Mapping[str, Any], version: Resolved) -> Mapping[str, Mapping[str, Any]]:
    """Return the description of each split in the content of an entry, by name.

    Raises:
        CorruptDataError: a split is not described by the digest of a table and numbers of samples and bytes.
    """
    problem = f"the entry of {version} has no valid list of splits"
    splits = content.get("splits")
    if not isinstance(splits, Mapping):
        raise CorruptDataError(f"{problem}: expected an object, found {type(splits).__name__}; restore the entry")
    for name, split in splits.items():
        if not isinstance(split, Mapping):
            raise CorruptDataError(f"{problem}: split {name!r} is {type(split).__name__}, expected an object")
        if not isinstance(split.get("table"), str):
            raise CorruptDataError(f"{problem}: split {name!r} has no digest of a table")
        parse_digest(split["table"])
        for field in ("samples", "bytes", "shards"):
            # A Boolean is an integer in Python.
            if type(split.get(field)) is not int or split[field] < 0:
                raise CorruptDataError(
                    f"{problem}: {field!r} of split {name!r} is {split.get(field)!r}, expected a number"
                )
    return splits


# Numbers of versions are a topological order: a version has a higher number than what it continues.


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
