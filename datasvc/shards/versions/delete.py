"""Delete samples: commit the next version of a data set with new deletion bitmaps; shards are not changed.

`repo.datasets.delete` and the command `datasvc delete` call `delete`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from datasvc.errors import ConfigError, NotFoundError
from datasvc.keyed_random import Integers
from datasvc.printable import count_text
from datasvc.repository import Objects, Repository, Resolved
from datasvc.repository.logs.references import refuse_text
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.lines.commit import check_newest, commit_on_line, find_line, head_of_line
from datasvc.shards.versions.dataset import DatasetVersion, choose_split, open_dataset
from datasvc.shards.versions.deletions import delete_samples
from datasvc.shards.versions.keys import SplitKeys
from datasvc.shards.versions.matching import first_keys
from datasvc.shards.versions.sql_filter import Condition
from datasvc.shards.versions.version_entry import changed_entry


@dataclass(frozen=True)
class DeleteReport:
    """The result of `delete`.

    Attributes:
        version: the committed version; if there was nothing to delete, the newest version, which is unchanged.
        deleted: number of deleted samples by split; empty if nothing was committed.
        missing: requested keys that no split has, sorted.
        dry_run: whether nothing was committed, and `deleted` is what would be deleted from `version`.
    """

    version: Resolved
    deleted: dict[str, int]
    missing: list[str] = field(default_factory=list)
    dry_run: bool = False

    @property
    def num_deleted(self) -> int:
        """Number of deleted samples; 0 if there was nothing to delete."""
        return sum(self.deleted.values())


def delete(
    repository: Repository,
    ref: str,
    *,
    keys: Iterable[str] | None = None,
    where: str | None = None,
    split: str | None = None,
    ignore_missing: bool = False,
    dry_run: bool = False,
    message: str = "",
) -> DeleteReport:
    """Commit the next version of a data set without the samples that `keys` or `where` selects.

    If another writer commits a version first, the samples to delete are selected again from that version.

    Args:
        repository: the repository that stores the data set.
        ref: the version to continue, which must be the newest of its line: NAME, NAME@BRANCH or NAME@VERSION.
        keys: keys of the samples to delete, in every split that has them.
        where: SQL expression over the columns, see `sql_filter.Condition`. Give either this or `keys`.
        split: the only split to delete from; None: all splits.
        ignore_missing: continue if a key does not exist.
        dry_run: only count the samples, and commit nothing.
        message: text stored with the version.

    Raises:
        ConfigError: both or neither of `keys` and `where` are given; the expression is invalid; all samples of a
            split would be deleted.
        NotFoundError: there is no such version or split; or keys do not exist (the message lists up to ten).
        ConflictError: `ref` is not the newest version of its line; or see `Log.append`.
        CorruptDataError, UnknownOutcomeError, UnavailableError: see `Log.append`, `Objects.read`.
    """
    if (keys is None) == (where is None):
        raise ConfigError(
            "expected either keys or a condition that selects the samples to delete, not both or neither"
        )
    base, line = find_line(repository, ref)
    log = repository.versions("datasets", base.name)
    check_newest(base, line, head_of_line(repository, line, log.head()))
    build = _DeleteBuild(repository, base, _checked_keys(keys), where, split, ignore_missing, message)
    if dry_run:
        build.select(base)
        return DeleteReport(base, build.deleted, build.missing, dry_run=True)
    try:
        committed = commit_on_line(repository, line, build)
    except _NothingToDeleteError:
        return DeleteReport(build.parent, {}, build.missing)
    return DeleteReport(Resolved("datasets", base.name, committed.number), build.deleted, build.missing)


class _NothingToDeleteError(Exception):
    """Ends `Log.append` without a commit: no sample is selected."""


@dataclass(eq=False)
class _DeleteBuild:
    """Builds the log entry from the newest version. `commit_on_line` calls it again if that is another one by then.

    Attributes:
        repository, keys, where, split, ignore_missing, message: as in `delete`.
        parent: the version that the last call built on; before the first call, the newest version.
        deleted: number of samples that the last call deleted, by split.
        missing: keys that the first call did not find, sorted.
    """

    repository: Repository
    parent: Resolved
    keys: frozenset[str] | None
    where: str | None
    split: str | None
    ignore_missing: bool
    message: str
    deleted: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    _attempts: int = 0

    def select(
        self, parent: Resolved
    ) -> tuple[DatasetVersion, dict[str, ShardTable], dict[str, dict[int, Integers]]]:
        """Select the samples to delete from version `parent`, and set `parent`, `deleted` and `missing`.

        Returns:
            The version to continue, its searched tables by split, and the result of `_select_rows`.
        """
        self._attempts += 1
        self.parent = parent
        dataset = open_dataset(self.repository, str(self.parent))
        tables = {opened.name: opened.table for opened in choose_split(dataset, self.split)}
        rows_by_split = self._select_rows(tables)
        self.deleted = {split: sum(map(len, rows.values())) for split, rows in rows_by_split.items()}
        for split, count in self.deleted.items():
            if count == tables[split].num_samples:
                raise ConfigError(
                    f"all samples of split {split!r} of {self.parent} would be deleted: nothing was committed"
                )
        return dataset, tables, rows_by_split

    def __call__(self, parent: Resolved | None) -> Mapping[str, Any]:
        dataset, tables, rows_by_split = self.select(parent or self.parent)
        if not rows_by_split:
            raise _NothingToDeleteError
        objects = self.repository.objects
        changed = {split: delete_samples(objects, tables[split], rows) for split, rows in rows_by_split.items()}
        change: dict[str, Any] = {"kind": "delete", "deleted": sum(self.deleted.values())}
        if self.where is not None:
            change["where"] = self.where
        if self.split is not None:
            change["split"] = self.split
        return changed_entry(dataset, changed, change, message=self.message)

    def _select_rows(self, tables: Mapping[str, ShardTable]) -> dict[str, dict[int, Integers]]:
        """Return the rows to delete in each shard's file, by split and shard; splits without any are left out."""
        objects = self.repository.objects
        if self.where is None:
            rows_by_split = self._select_rows_by_key(objects, tables)
        else:
            rows_by_split = {
                split: dict(Condition(self.where, table.sample_schema, table.classes).find(objects, table))
                for split, table in tables.items()
            }
        return {split: rows for split, rows in rows_by_split.items() if rows}

    def _select_rows_by_key(
        self, objects: Objects, tables: Mapping[str, ShardTable]
    ) -> dict[str, dict[int, Integers]]:
        """Return the rows of the keys, as `_select_rows`; splits without any are included."""
        assert self.keys is not None, "`delete` requires either keys or a condition"
        rows_by_split: dict[str, dict[int, Integers]] = {}
        existing: set[str] = set()
        for split, table in tables.items():
            rows_by_split[split] = {}
            for shard_keys in SplitKeys(objects, table):
                keys = shard_keys.keys.to_pylist()
                positions = [position for position, key in enumerate(keys) if key in self.keys]
                if positions:
                    existing.update(keys[position] for position in positions)
                    rows_by_split[split][shard_keys.shard] = shard_keys.rows[np.array(positions)]
        self._check_missing(self.keys - existing)
        return rows_by_split

    def _check_missing(self, missing: frozenset[str]) -> None:
        """Record the keys that do not exist, and raise NotFoundError unless they are ignored."""
        # Only the first call checks: a key that a later call does not find was deleted by another writer.
        if self._attempts > 1:
            return
        self.missing = sorted(missing)
        if missing and not self.ignore_missing:
            searched = f"{self.parent}/{self.split}" if self.split else self.parent
            listed = first_keys(self.missing)
            raise NotFoundError(
                f"{count_text(len(missing), 'key is', 'keys are')} not in {searched}: {listed}; nothing was committed"
            )


def _checked_keys(keys: Iterable[str] | None) -> frozenset[str] | None:
    refuse_text(keys, "keys", "keys")
    return None if keys is None else frozenset(keys)
