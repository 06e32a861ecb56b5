"""Log entries of data sets: the newest ones, and what they say of their splits.

`datasvc ls` needs no more. This module imports neither Arrow nor NumPy, which take longer to import than a list of
data sets takes to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.repository import Entry, Repository, Resolved
from datasvc.repository.logs.references import is_name
from datasvc.repository.objects.objects import parse_digest
from datasvc.repository.unreadable import warn_unreadable
from datasvc.shards.lines.commit import renamed_to


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
