"""Log entries of data-set versions: the description of their splits, and the fields that a version inherits.

Ingest, append, merge, delete and naming of classes use these functions to build the entries that they commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from datasvc.errors import CorruptDataError, DatasvcError
from datasvc.repository import Digest, Objects, Repository, Resolved
from datasvc.repository.objects.objects import parse_digest
from datasvc.repository.objects.presence import check_present
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.dataset import DatasetVersion, read_version
from datasvc.shards.versions.split_overlap import ENTRY_FIELD

# Field of a log entry, see `read_val_fraction`.
VAL_FRACTION: Final = "val_fraction"
# Field of a log entry, see `has_place_keys`.
PLACE_KEYS: Final = "keys_are_places"
_MAX_NAMES: Final = 3


def read_tables(repository: Repository, version: Resolved) -> dict[str, ShardTable]:
    """Return the shard tables of a version, which may be removed, by split. Raise what `read_version` raises."""
    return {name: split.table for name, split in read_version(repository, version).items()}


def name_table(repository: Repository, digest: str, *, dataset: str) -> str:
    """Return the splits that have a shard table, such as "pets@1/train", for a message; `dataset` is searched first.

    If no version of the repository has it, or the entries cannot be read, the text has the digest: the message must
    not fail because of its details.
    """
    unknown = f"a data-set version that is not in this repository (shard table {digest[:12]}...)"
    try:
        for name in dict.fromkeys([dataset, *repository.names("datasets")]):
            entries, _ = repository.versions("datasets", name).try_entries()
            found = [
                f"{name}@{entry.number}/{split}"
                for entry in entries
                for split, fields in _mapping(entry.content, "splits").items()
                if isinstance(fields, Mapping) and fields.get("table") == digest
            ]
            if found:
                # Versions that only changed other splits share the table.
                return " = ".join(found[:_MAX_NAMES]) + (" = ..." if len(found) > _MAX_NAMES else "")
        table = ShardTable.decode(repository.objects.read(parse_digest(digest)), digest)
        if table.view is not None:
            return f"{table.view.dataset}/{table.view.split}[{table.view}]"
    except (DatasvcError, ValueError):
        return unknown
    return unknown


def describe_tables(
    objects: Objects, tables: Mapping[str, ShardTable], *, before: Iterable[ShardTable] = ()
) -> dict[str, dict[str, Any]]:
    """Store tables and return the description of the splits for a log entry.

    The objects that the tables refer to must exist. This is checked, except for objects that the tables in `before`
    refer to: these are the tables of the committed versions that `tables` were made from.

    Raises:
        NotFoundError: an object that only the new tables refer to no longer exists.
        UnavailableError: the store did not respond.
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
    referenced = set[Digest]().union(*(table.objects() for table in tables.values()))
    referenced_before = set[Digest]().union(*(table.objects() for table in before))
    stored = [split["table"] for split in described.values()]
    what = "a version with the splits " + ", ".join(tables)
    # Checked before the commit, because an entry must not refer to an object that a concurrent gc removed.
    check_present(objects, [*(referenced - referenced_before), *stored], what)
    return described


def read_val_fraction(repository: Repository, version: Resolved) -> float:
    """Return the fraction of `train` that a data set holds out as `val`.

    An entry of an old format does not record the fraction. Then the fraction of its original ingest is returned.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: a log entry cannot be read.
    """
    origin, content = _find_origin(repository, version, _parent_without_fraction)
    fraction = content.get(VAL_FRACTION, _mapping(_mapping(content, "source"), "options").get(VAL_FRACTION, 0.0))
    if not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
        raise CorruptDataError(f"{origin}: {VAL_FRACTION} is {fraction!r:.80}, expected a number from 0 to 1")
    return float(fraction)


def read_ingest_options(repository: Repository, version: Resolved) -> Mapping[str, Any]:
    """Return the options of the newest ingest in the history of a version; {} if no ingest is found.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: a log entry cannot be read.
    """

    def parent_of(content: Mapping[str, Any]) -> str | None:
        parent = content.get("parent") if _mapping(content, "source").get("kind") == "version" else None
        return parent if isinstance(parent, str) else None

    _, content = _find_origin(repository, version, parent_of)
    return _mapping(_mapping(content, "source"), "options")


def _find_origin(
    repository: Repository, version: Resolved, parent_of: Callable[[Mapping[str, Any]], str | None]
) -> tuple[Resolved, Mapping[str, Any]]:
    """Return the first of a version and its ancestors for whose entry `parent_of` is None, and the content."""
    seen: set[Resolved] = set()
    while True:
        if version in seen:  # otherwise a changed repository would keep its readers in this loop
            raise CorruptDataError(f"{version} is its own ancestor: its entry was changed; restore it from a copy")
        seen.add(version)
        content = repository.entry(version).content
        parent = parent_of(content)
        if parent is None:
            return version, content
        version = repository.resolve("datasets", parent, removed=True)


def has_place_keys(repository: Repository, version: Resolved) -> bool:
    """Return whether the keys of all samples are paths, numbers, or file and row: see `Source.keys_are_places`.

    False for an entry of a release that did not record it, and if a version that this one was made from is not here.

    Raises:
        CorruptDataError, NotFoundError, UnavailableError: a log entry cannot be read.
    """
    pending, seen = [version], {version}
    while pending:
        content = repository.entry(pending.pop()).content
        if _mapping(content, "source").get("kind") == "version":
            change = _mapping(content, "change")
            merged = change.get("versions")
            made_from = [content.get("parent"), *(merged if isinstance(merged, list) else ())]
            found = [repository.resolve("datasets", ref, removed=True) for ref in made_from if isinstance(ref, str)]
            if content.get("origin") is not None or not found or change.get("kind") == "revert":
                return False
            pending += [each for each in found if each not in seen]
            seen.update(found)
        elif not content.get(PLACE_KEYS, False):
            return False
    return True


def _parent_without_fraction(content: Mapping[str, Any]) -> str | None:
    if VAL_FRACTION in content:
        return None
    # An entry copied from another repository names merged versions of that repository, which do not resolve here.
    merged = _mapping(content, "change").get("versions") if content.get("origin") is None else None
    ancestor = content.get("parent") or (merged[0] if isinstance(merged, list) and merged else None)
    return ancestor if isinstance(ancestor, str) else None


def _mapping(content: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Return a field of an entry that may have been written by a stranger; {} if it is no mapping."""
    value = content.get(field)
    return value if isinstance(value, Mapping) else {}


def changed_entry(
    dataset: DatasetVersion, changed: Mapping[str, ShardTable], change: Mapping[str, Any], *, message: str
) -> dict[str, Any]:
    """Store the `changed` splits; return the log entry of a version that has them instead of those of `dataset`.

    The changed splits have no new samples. For `change` and `message`, see `derived_entry`. Raises what
    `describe_tables` raises.
    """
    before = [dataset[split].table for split in changed]
    content = dataset.entry.content
    return derived_entry(
        {**content["splits"], **describe_tables(dataset.repository.objects, changed, before=before)},
        change,
        message=message,
        parent=dataset.resolved,
        source=str(dataset.resolved),
        # Without new samples, nothing is held out and no sample becomes shared, so both fields stay valid.
        **{name: content[name] for name in (VAL_FRACTION, ENTRY_FIELD) if name in content},
    )


def derived_entry(
    splits: Mapping[str, Any],
    change: Mapping[str, Any],
    *,
    message: str,
    parent: Resolved | None,
    source: str,
    **more: Any,
) -> dict[str, Any]:
    """Return the log entry of a version that was made from other versions.

    Args:
        splits: result of `describe_tables`.
        change: kind of the change and its details.
        message: text given by the user.
        parent: the version of the same data set that it continues, if any.
        source: the versions it was made from, as text.
        **more: further fields.
    """
    return {
        **more,
        "message": message,
        "splits": dict(splits),
        # Fields that an ingest sets too. Nothing was read from a source here, so no sample was skipped.
        "source": {"kind": "version", "url": source, "options": {}},
        "skipped": 0,
        "parent": None if parent is None else str(parent),
        "change": dict(change),
    }
