"""Names for the classes of labels that are plain integers: given with an ingest, or to a version that is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from datasvc.errors import ConfigError, ConflictError
from datasvc.repository import Repository, Resolved
from datasvc.shards.format.schema import LABEL
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.dataset import open_dataset
from datasvc.shards.versions.labels import check_unnamed, combine_classes
from datasvc.shards.versions.version_entry import derived_entry, describe_tables, inherited


def name_tables(tables: Mapping[str, ShardTable], names: Sequence[str]) -> dict[str, ShardTable]:
    """Return the splits whose labels are integers without names, with names; label i is of the class `names[i]`.

    Raises:
        ConfigError: no split has such labels; a label has no name in the list; a name is there twice, or is empty;
            the classes have names already, and `names` does not start with them.
    """
    if "" in names or not names:
        raise ConfigError("a class has an empty name, or there is none; give one name a line, that of label 0 first")
    combine_classes(names, [])
    labelled = {split: table for split, table in tables.items() if LABEL in table.sample_schema.names}
    if not labelled:
        raise ConfigError("there are no labels to name: no split has the column 'label'")
    for split, table in labelled.items():
        if tuple(names[: len(table.classes)]) != table.classes:
            raise ConfigError(
                f"the classes of split {split!r} have names already ({', '.join(table.classes[:3])}, ...); a name "
                "stays, so that models on older versions mean the same: new names may only follow these"
            )
        check_unnamed(table.label_counts, names, f"split {split!r}")
    return {split: replace(table, classes=tuple(names)) for split, table in labelled.items()}


def name_classes(repository: Repository, ref: str, names: Sequence[str], *, message: str = "") -> Resolved:
    """Commit the next version of a data set, with names for its integer labels. Shards are shared.

    Args:
        repository: where it is.
        ref: the version to continue, which must be the newest.
        names: of the classes; label i is of the class `names[i]`.
        message: kept with the version.

    Raises:
        ConfigError: as `name_tables`.
        ConflictError: `ref` is not the newest version; or as `Log.append`.
        NotFoundError, CorruptDataError, UnknownOutcomeError, UnavailableError: as `Log.append`, `open_dataset`.
    """
    base = repository.resolve("datasets", ref)

    def build(head: int) -> dict[str, Any]:
        if head != base.version:
            raise ConflictError(f"{base} is not the newest version, which is {base.name}@{head}: give {base.name}")
        before = open_dataset(repository, str(base))
        tables = {split: each.table for split, each in before.items()}
        described = describe_tables(repository.objects, name_tables(tables, names), before=tables.values())
        return derived_entry(
            {**before.entry.content["splits"], **described},
            {"kind": "classes"},
            message=message,
            parent=base,
            source=str(base),
            **inherited(before.entry.content),
        )

    committed = repository.versions("datasets", base.name).append(build)
    return Resolved("datasets", base.name, committed.number)
