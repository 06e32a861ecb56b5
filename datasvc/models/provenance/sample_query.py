"""Queries of `find_consumers`: the requested keys, and the splits in which a key identifies a requested sample.

In another data set, the same key may identify another sample. A data-set version is identified by the digests of its
shard tables, not by its number: the entry of a model version that was copied has the numbers of its own repository.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.models.provenance.consumed_ranges import parse_use
from datasvc.models.registry.ancestry import HISTORY
from datasvc.models.versions.data_use import DataUse
from datasvc.repository import Digest, Objects, Repository
from datasvc.repository.logs.heads import parents_of
from datasvc.repository.logs.references import parse_reference
from datasvc.repository.objects.objects import parse_digest
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.diff import diff_versions
from datasvc.threads import map_in_threads

_READS_AT_ONCE: Final = 8


@dataclass(frozen=True)
class Deletion:
    """A data-set version that deleted samples, or corrected their labels.

    Attributes:
        version: name with version, such as "pets@2".
        name: name of the data set.
        tables: digests of the shard tables of all versions of the data set in this repository.
        shards: digests of all shards of the split in earlier versions. In any split that uses one of these shards,
            the keys in this shard identify the same samples, whatever the name of the data set.
    """

    version: str
    name: str
    tables: frozenset[Digest]
    shards: frozenset[Digest]


@dataclass(frozen=True)
class SampleQuery:
    """Requested samples: their keys, and the splits where a key matches, which means: identifies a requested sample.

    Attributes:
        keys: distinct keys.
        data: data set ("imagenet") or version ("imagenet@3") in which the keys match. None means all data sets, but
            with `deletion` only the shards of the deletion.
        split: name of the splits in which the keys match; None means all splits.
        tables: shard tables of the version `data`, if it is in this repository; then the keys match only in these.
        deletion: the keys match in the shards of this deletion, in addition to `data`; None: only in `data`.
        corrected: for each key, the class that `deletion` gave it: samples that have it do not match; () for others.
        more_tables: shard tables of all versions of the data set `data` in this repository: the keys match in these
            too, if the split was recorded with an earlier name of the data set.
    """

    keys: tuple[str, ...]
    data: str | None = None
    split: str | None = None
    tables: frozenset[Digest] | None = None
    deletion: Deletion | None = None
    corrected: tuple[str, ...] = ()
    more_tables: frozenset[Digest] = frozenset()

    def matches_whole_split(self, names: Iterable[str], table: Digest) -> bool:
        """Return whether the keys match in every shard of a split.

        Args:
            names: recorded names of the split, such as "imagenet@3/train".
            table: digest of its shard table; of a view, that of the split of a version, see `version_table`.
        """
        if self.tables is not None:
            return table in self.tables
        if self.deletion is not None and self.data is None:
            return False  # the keys match only in the shards of the deletion
        return table in self.more_tables or any(_is_split_of(name, self.data, self.split) for name in names)

    def is_of_deletion_dataset(self, names: Iterable[str]) -> bool:
        """Return whether the names of a split belong to the data set that the samples were deleted from."""
        return self.deletion is not None and any(_is_split_of(name, self.deletion.name, self.split) for name in names)


def query_keys(
    repository: Repository, keys: Iterable[str], *, data: str | None = None, split: str | None = None
) -> SampleQuery:
    """Return the query for samples with the given keys.

    Raises:
        ConfigError: `data` is not a valid reference.
        CorruptDataError, UnavailableError: see `Log.read`.
    """
    tables = _tables_of(repository, data, split)
    more_tables = _tables_of_all_versions(repository, data, split)
    return SampleQuery(tuple(dict.fromkeys(keys)), data, split, tables, more_tables=more_tables)


def query_deleted(
    repository: Repository,
    ref: str,
    *,
    data: str | None = None,
    split: str | None = None,
    relabelled: bool = False,
) -> list[SampleQuery]:
    """Return one query per split for the samples that a data-set version deleted, or `relabelled`.

    `data` is another data set, or version, in which the same keys identify the same samples, even if it has no shard
    in common. With `split`, only the samples of this split are searched.

    Raises:
        NotFoundError: there is no such version, or it is the first one.
        ConfigError, CorruptDataError, UnavailableError: see `shards.diff`.
    """
    version = repository.resolve("datasets", ref, removed=True)
    parent = repository.entry(version).content.get("parent")
    if parent is None and version.version == 1:
        raise NotFoundError(
            f"{version} is the first version of {version.name}, so it deleted or corrected no samples"
        )
    if parent is None:
        # An entry without `parent` was made from the version before it on its line.
        before = parents_of(repository.positions(version.name), version.version)
        parent = f"{version.name}@{before[0] if before else version.version - 1}"
    splits = diff_versions(repository, repository.resolve("datasets", parent, removed=True), version).splits
    entries = repository.entries("datasets", version.name)
    tables = {entry.number: split_tables(entry.content, f"{version.name}@{entry.number}") for entry in entries}
    all_tables = frozenset(table for by_split in tables.values() for table in by_split.values())
    queries = []
    for name, changes in splits.items():
        labels = changes.relabelled if relabelled and split in {None, name} else []
        keys = tuple(change.key for change in labels) if relabelled else tuple(changes.deleted)
        if split in {None, name} and keys:
            # Use all earlier versions, not only the parent: each may have the samples in other shards.
            earlier_tables = {
                by_split[name] for number, by_split in tables.items() if number < version.version and name in by_split
            }
            shards = frozenset(
                shard.digest
                for table in read_tables(repository.objects, earlier_tables).values()
                if table is not None
                for shard in table.shards()
            )
            deletion = Deletion(str(version), version.name, all_tables, shards)
            data_tables = _tables_of(repository, data, name)
            more_tables = _tables_of_all_versions(repository, data, name)
            corrected = tuple(change.new for change in labels)
            queries.append(SampleQuery(keys, data, name, data_tables, deletion, corrected, more_tables))
    return queries


def version_table(digest: Digest, table: ShardTable | None) -> Digest:
    """Return the digest of a table of a version: that of the table itself, or of the split that a view comes from."""
    return digest if table is None or table.view is None else table.view.table


def read_tables(objects: Objects, digests: Iterable[Digest]) -> dict[Digest, ShardTable | None]:
    """Return shard tables by digest; None for tables that are not in the repository."""

    def read(digest: Digest) -> ShardTable | None:
        try:
            return ShardTable.read(objects, digest)
        except NotFoundError:
            return None

    distinct = sorted(set(digests))
    return dict(zip(distinct, map_in_threads(read, distinct, _READS_AT_ONCE), strict=True))


def _tables_of(repository: Repository, data: str | None, split: str | None) -> frozenset[Digest] | None:
    """Return the shard tables of the version `data`, only of `split` if it is given.

    None if `data` is None, names a data set without a version, or names a version that is not in this repository.
    """
    reference = None if data is None else parse_reference(data)
    if data is None or reference is None or (reference.version is None and reference.tag is None):
        return None
    try:
        version = repository.resolve("datasets", data, removed=True)
    except NotFoundError:
        return None
    tables = split_tables(repository.entry(version).content, str(version))
    return frozenset(table for name, table in tables.items() if split in {None, name})


def _tables_of_all_versions(repository: Repository, data: str | None, split: str | None) -> frozenset[Digest]:
    """Return the shard tables of all versions of the data set `data`, or none if `data` is None or one version."""
    reference = None if data is None else parse_reference(data)
    if reference is None or reference.version is not None or reference.tag is not None:
        return frozenset()
    entries, _ = repository.versions("datasets", reference.name).try_entries()
    tables: set[Digest] = set()
    for entry in entries:
        with suppress(CorruptDataError):
            by_split = split_tables(entry.content, f"{reference.name}@{entry.number}")
            tables.update(table for name, table in by_split.items() if split in {None, name})
    return frozenset(tables)


def split_tables(entry: Mapping[str, Any], version: str) -> dict[str, Digest]:
    """Return the digests of the shard tables in the entry of a data-set version, by name of the split.

    Raises:
        CorruptDataError: the entry has no valid list of splits.
    """
    try:
        return {str(name): parse_digest(split["table"]) for name, split in entry["splits"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(f"the entry of {version} has no valid list of splits: {error!r}") from error


def tables_of_uses(content: Mapping[str, Any], *, of_views: bool = False) -> set[Digest]:
    """Return the shard tables that a model version and its ancestors elsewhere read; uses not valid are left out.

    With `of_views`, uses of splits as they are are left out too; those of a mixture, if it has no view.
    """
    tables: set[Digest] = set()
    for field in ("data", HISTORY):
        uses = content.get(field)
        for item in uses if isinstance(uses, list) else ():
            with suppress(CorruptDataError, ConfigError):
                use = DataUse.from_dict(item)
                tables |= set(parse_use(use)[0].tables) if use.view is not None or not of_views else set()
    return tables


def _is_split_of(name: str, data: str | None, split: str | None) -> bool:
    """Return whether a split, such as "imagenet@3/train", is in `data` and has the name `split`; None matches all."""
    version, _, split_name = name.rpartition("/")
    return split in {None, split_name} and data in {None, version, version.partition("@")[0]}
