"""Names for the classes of an existing data set with plain integer labels, as its next version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datasvc.repository import Repository, Resolved
from datasvc.repository.logs.references import refuse_text
from datasvc.shards.lines.commit import check_newest, commit_on_line, find_line
from datasvc.shards.versions.dataset import open_dataset
from datasvc.shards.versions.labels import name_tables
from datasvc.shards.versions.version_entry import changed_entry


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
