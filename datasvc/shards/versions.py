"""A data-set version as values: the tables of its splits, and the log entry that names them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from datasvc.repository import Digest, Objects, Repository, Resolved
from datasvc.repository.presence import check_present
from datasvc.shards.dataset import open_dataset
from datasvc.shards.table import ShardTable


def read_tables(repository: Repository, version: Resolved) -> dict[str, ShardTable]:
    """Return the shard tables of a version by split. Raises CorruptDataError, NotFoundError, UnavailableError."""
    return {name: split.table for name, split in open_dataset(repository, str(version)).items()}


def describe_tables(
    objects: Objects, tables: Mapping[str, ShardTable], *, before: Iterable[ShardTable] = ()
) -> dict[str, dict[str, Any]]:
    """Store tables and return what a version's entry says of its splits.

    Args:
        objects: where to.
        tables: by split.
        before: of the versions that these were made from; what they name is not looked at.

    Raises:
        NotFoundError: an object that is new in the tables is not there any more.
        UnavailableError: the store did not answer.
    """
    described: dict[str, dict[str, Any]] = {
        split: {
            "table": objects.put(table.encode()).digest,
            "samples": table.num_samples,
            "bytes": table.size_bytes,
            "shards": table.num_shards,
        }
        for split, table in tables.items()
    }
    named = set[Digest]().union(*(table.objects() for table in tables.values()))
    known = set[Digest]().union(*(table.objects() for table in before))
    stored = [split["table"] for split in described.values()]
    check_present(objects, [*(named - known), *stored], "a version with the splits " + ", ".join(tables))
    return described


def derived_entry(
    splits: Mapping[str, Any], change: Mapping[str, Any], *, message: str, parent: Resolved | None, source: str
) -> dict[str, Any]:
    """Return the entry of a version that was made from others.

    Args:
        splits: from `describe_tables`.
        change: its `kind` and what it did.
        message: of whoever made it.
        parent: the version of the same data set that it continues.
        source: the versions it was made from, for people.
    """
    return {
        "message": message,
        "splits": dict(splits),
        "source": {"kind": "version", "url": source, "options": {}},
        "skipped": 0,
        "parent": None if parent is None else str(parent),
        "change": dict(change),
    }
