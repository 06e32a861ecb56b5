"""Delete: the next version of a data set without some of its samples. No shard is touched: only bitmaps are new."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from datasvc.errors import ConfigError, ConflictError, NotFoundError
from datasvc.keyed_random import Integers
from datasvc.repository import Objects, Repository, Resolved
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.dataset import choose_split, open_dataset
from datasvc.shards.versions.deletions import delete_samples
from datasvc.shards.versions.keys import SplitKeys
from datasvc.shards.versions.sql_filter import Condition
from datasvc.shards.versions.version_entry import derived_entry, describe_tables, inherited

_NAMED_KEYS = 10


@dataclass(frozen=True)
class DeleteReport:
    """What a delete did.

    Attributes:
        version: the committed version; the one that it would have continued where nothing was to delete.
        deleted: samples deleted, by split; empty where nothing was committed.
        missing: keys asked for that no split has, sorted.
    """

    version: Resolved
    deleted: dict[str, int]
    missing: list[str] = field(default_factory=list)

    @property
    def num_deleted(self) -> int:
        """Samples deleted; 0 means that nothing was committed."""
        return sum(self.deleted.values())


def delete(
    repository: Repository,
    ref: str,
    *,
    keys: Iterable[str] | None = None,
    where: str | None = None,
    split: str | None = None,
    ignore_missing: bool = False,
    message: str = "",
) -> DeleteReport:
    """Commit the next version of a data set, without the samples that `keys` or `where` name.

    When others commit meanwhile, the samples are looked for again in what they made.

    Args:
        repository: where it lies.
        ref: the version to continue, which must be the newest.
        keys: of the samples; in every split that has them.
        where: SQL expression over the columns, see `sql_filter.Condition`; needs DuckDB. Either this or `keys`.
        split: look there only; None: in all.
        ignore_missing: go on where a key is not there.
        message: kept with the version.

    Raises:
        ConfigError: both or none of `keys` and `where` are given; the expression is wrong; a split would be empty.
        NotFoundError: no such version or split; or keys are not there: names up to ten.
        ConflictError: `ref` is not the newest version; or as `Log.append`.
        CorruptDataError, UnknownOutcomeError, UnavailableError: see `Log.append`, `Objects.read`.
    """
    if (keys is None) == (where is None):
        raise ConfigError("say which samples to delete: by keys, or by a condition, not both")
    base = repository.resolve("datasets", ref)
    log = repository.versions("datasets", base.name)
    newest = log.head()
    if base.version != newest:
        raise ConflictError(
            f"{base} is not the newest version, which is {base.name}@{newest}, and a version continues the newest: "
            f"give {base.name} or {base.name}@{newest}"
        )
    build = _DeleteBuild(
        repository, base.name, _wanted(keys), where, split, ignore_missing=ignore_missing, message=message
    )
    try:
        committed = log.append(build)
    except _NothingToDeleteError:
        return DeleteReport(build.parent, {}, build.missing)
    return DeleteReport(Resolved("datasets", base.name, committed.number), build.deleted, build.missing)


class _NothingToDeleteError(Exception):
    """Ends an append without a commit."""


class _DeleteBuild:
    """Builds the entry on whatever version is the newest; called again when a commit was lost to another.

    Attributes:
        parent: the version of the last call.
        deleted: samples that it deleted, by split.
        missing: keys that the first call did not find.
    """

    def __init__(
        self,
        repository: Repository,
        name: str,
        keys: frozenset[str] | None,
        where: str | None,
        split: str | None,
        *,
        ignore_missing: bool,
        message: str,
    ) -> None:
        self.parent = Resolved("datasets", name, 0)
        self.deleted: dict[str, int] = {}
        self.missing: list[str] = []
        self._repository = repository
        self._keys, self._where, self._split = keys, where, split
        self._ignore_missing = ignore_missing
        self._attempts = 0
        self._message = message

    def __call__(self, head: int) -> Mapping[str, Any]:
        self._attempts += 1
        self.parent = Resolved("datasets", self.parent.name, head)
        dataset = open_dataset(self._repository, str(self.parent))
        tables = {each.name: each.table for each in choose_split(dataset, self._split)}
        rows = self._find(tables)
        objects = self._repository.objects
        self.deleted = {split: sum(map(len, chosen.values())) for split, chosen in rows.items()}
        if not rows:
            raise _NothingToDeleteError
        for split, count in self.deleted.items():
            if count == tables[split].num_samples:
                raise ConfigError(f"nothing would be left of split {split!r} of {self.parent}: nothing was committed")
        changed = {split: delete_samples(objects, tables[split], chosen) for split, chosen in rows.items()}
        splits = {**dataset.entry.content["splits"], **describe_tables(objects, changed, before=tables.values())}
        return derived_entry(
            splits,
            self._describe(),
            message=self._message,
            parent=self.parent,
            source=str(self.parent),
            **inherited(dataset.entry.content),
        )

    def _describe(self) -> dict[str, Any]:
        change: dict[str, Any] = {"kind": "delete", "deleted": sum(self.deleted.values())}
        if self._where is not None:
            change["where"] = self._where
        if self._split is not None:
            change["split"] = self._split
        return change

    def _find(self, tables: Mapping[str, ShardTable]) -> dict[str, dict[int, Integers]]:
        """Return the stored rows to delete, by split and shard; only where there are any."""
        objects = self._repository.objects
        if self._where is not None:
            found = {split: dict(self._find_where(objects, table)) for split, table in tables.items()}
        else:
            found = self._find_keys(objects, tables)
        return {split: rows for split, rows in found.items() if rows}

    def _find_where(self, objects: Objects, table: ShardTable) -> Iterator[tuple[int, Integers]]:
        assert self._where is not None
        return Condition(self._where, table.sample_schema).find(objects, table)

    def _find_keys(self, objects: Objects, tables: Mapping[str, ShardTable]) -> dict[str, dict[int, Integers]]:
        assert self._keys is not None
        found: dict[str, dict[int, Integers]] = {}
        seen: set[str] = set()
        for split, table in tables.items():
            found[split] = {}
            for each in SplitKeys(objects, table):
                keys = each.keys.to_pylist()
                places = [place for place, key in enumerate(keys) if key in self._keys]
                if places:
                    seen.update(keys[place] for place in places)
                    found[split][each.shard] = each.rows[np.array(places)]
        self._check_missing(self._keys - seen)
        return found

    def _check_missing(self, missing: frozenset[str]) -> None:
        """Look at the keys that the first call did not find; later ones were deleted by somebody else: as wished."""
        if self._attempts > 1:
            return
        self.missing = sorted(missing)
        if missing and not self._ignore_missing:
            more = f" and {len(missing) - _NAMED_KEYS} more" if len(missing) > _NAMED_KEYS else ""
            place = f"{self.parent}/{self._split}" if self._split else self.parent
            raise NotFoundError(
                f"{len(missing)} keys are not in {place}: {', '.join(map(repr, self.missing[:_NAMED_KEYS]))}{more}; "
                "nothing was committed"
            )


def _wanted(keys: Iterable[str] | None) -> frozenset[str] | None:
    if isinstance(keys, str):
        raise ConfigError(f"keys is the text {keys!r}; expected several keys, such as [{keys!r}]")
    return None if keys is None else frozenset(keys)
