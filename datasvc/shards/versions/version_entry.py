"""A data-set version as values: the tables of its splits, and the log entry that names them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from datasvc.repository import Digest, Objects, Repository, Resolved
from datasvc.repository.objects.presence import check_present
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.dataset import open_dataset
from datasvc.shards.versions.split_overlap import ENTRY_FIELD

VAL_FRACTION: Final = "val_fraction"


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


def read_val_fraction(repository: Repository, version: Resolved) -> float:
    """Return the share of `train` that a data set holds out as `val`.

    Versions from before entries had it are what the ingest was told that they go back to.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: an entry cannot be read.
    """
    while True:
        content = repository.entry(version).content
        if VAL_FRACTION in content:
            return float(content[VAL_FRACTION])
        # What a version from another repository was merged from has its names there, not here.
        merged = content.get("change", {}).get("versions", []) if content.get("origin") is None else []
        before = content.get("parent") or (merged[0] if merged else None)
        if before is None:
            return float(content.get("source", {}).get("options", {}).get(VAL_FRACTION, 0.0))
        version = repository.resolve("datasets", before)


def inherited(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the entry of a version hands on to one that has no other samples than it."""
    return {name: content[name] for name in (VAL_FRACTION, ENTRY_FIELD) if name in content}


def derived_entry(
    splits: Mapping[str, Any],
    change: Mapping[str, Any],
    *,
    message: str,
    parent: Resolved | None,
    source: str,
    **more: Any,
) -> dict[str, Any]:
    """Return the entry of a version that was made from others.

    Args:
        splits: from `describe_tables`.
        change: its `kind` and what it did.
        message: of whoever made it.
        parent: the version of the same data set that it continues.
        source: the versions it was made from, for people.
        **more: further fields.
    """
    return {
        **more,
        "message": message,
        "splits": dict(splits),
        "source": {"kind": "version", "url": source, "options": {}},
        "skipped": 0,
        "parent": None if parent is None else str(parent),
        "change": dict(change),
    }
