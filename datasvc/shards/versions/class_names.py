"""Names for classes with plain integer labels: set during an ingest, or added to an existing data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from datasvc.errors import ConfigError
from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.references import refuse_text
from datasvc.shards.format.schema import LABEL
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.lines.commit import check_newest, commit_on_line, find_line
from datasvc.shards.versions.dataset import open_dataset
from datasvc.shards.versions.labels import check_unnamed, combine_classes
from datasvc.shards.versions.version_entry import changed_entry


def name_tables(tables: Mapping[str, ShardTable], names: Sequence[str]) -> dict[str, ShardTable]:
    """Return the splits that have labels, with class names; label i belongs to the class `names[i]`.

    Raises:
        ConfigError: no split has labels; a label has no name in `names`; a name is empty or occurs twice; or the
            classes already have names and `names` does not start with them.
    """
    if "" in names or not names:
        raise ConfigError("expected one name per class, none of them empty; give one name per line, label 0 first")
    combine_classes(names, [])  # only for its check that no name occurs twice
    labelled = {split: table for split, table in tables.items() if LABEL in table.sample_schema.names}
    if not labelled:
        raise ConfigError("no split has the column 'label', so there are no classes to name")
    for split, table in labelled.items():
        # Names may be added to a list, but the index of an existing name never changes.
        if tuple(names[: len(table.classes)]) != table.classes:
            raise ConfigError(
                f"the classes of split {split!r} already have names ({', '.join(table.classes[:3])}, ...), which "
                "cannot change because models trained on older versions use them: start the list with these names"
            )
        check_unnamed(table.label_counts, names, f"split {split!r}")  # `names` must cover every label
    return {split: replace(table, classes=tuple(names)) for split, table in labelled.items()}


def name_classes(repository: Repository, ref: str, names: Sequence[str], *, message: str = "") -> Resolved:
    """Commit the next version of a data set with names for its integer labels. No shard is written.

    Args:
        repository: the repository that stores the data set.
        ref: the version to continue, which must be the newest of its line.
        names: class names; label i belongs to the class `names[i]`.
        message: text stored with the version.

    Raises:
        ConfigError: see `name_tables`.
        ConflictError: `ref` is not the newest version of its line; or see `Log.append`.
        NotFoundError, CorruptDataError, UnknownOutcomeError, UnavailableError: see `Log.append`, `open_dataset`.
    """
    refuse_text(names, "names", "names")
    base, line = find_line(repository, ref)

    def build(newest: Resolved | None) -> dict[str, Any]:
        # Called again after a commit by another writer, and `base` is then no longer the newest version.
        check_newest(base, line, newest)
        dataset = open_dataset(repository, str(base))
        tables = {name: split.table for name, split in dataset.items()}
        return changed_entry(dataset, name_tables(tables, names), {"kind": "classes"}, message=message)

    committed = commit_on_line(repository, line, build)
    return Resolved("datasets", base.name, committed.number)
