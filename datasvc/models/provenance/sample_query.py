"""Which samples are asked for, and in which splits they count.

A version of a data set is told by the digests of its shard tables, not by its number: an entry that came from another
repository may name what that version was called there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.repository import Digest, Objects, Repository
from datasvc.repository.logs.references import parse_reference
from datasvc.repository.objects.objects import parse_digest
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.diff import diff

_READS_AT_ONCE: Final = 8


@dataclass(frozen=True)
class Deletion:
    """A version of a data set that deleted samples.

    Attributes:
        version: "pets@2".
        name: of the data set.
        known: shard tables of all its versions that are here.
        shards: in which the samples lay before. Whatever shares one of these has them: versions before the deletion,
            what was made of them, and what is called otherwise.
    """

    version: str
    name: str
    known: frozenset[Digest]
    shards: frozenset[Digest]


@dataclass(frozen=True)
class SampleQuery:
    """Samples that are asked for: keys, and where they count.

    Attributes:
        keys: each once.
        data: in this data set, "imagenet", or this version of it, "imagenet@3"; None: in all.
        split: in splits of this name; None: in all.
        tables: in these only: those of the version `data`, where it is here.
        deletion: in the shards of this one too; then `data` None adds nothing to them.
    """

    keys: tuple[str, ...]
    data: str | None = None
    split: str | None = None
    tables: frozenset[Digest] | None = None
    deletion: Deletion | None = None

    def counts_in(self, names: Iterable[str], table: Digest) -> bool:
        """Return whether the keys count in all of a split, given as "imagenet@3/train" and its shard table."""
        if self.tables is not None:
            return table in self.tables
        if self.deletion is not None and self.data is None:
            return False
        return any(_is_of(name, self.data, self.split) for name in names)

    def may_be_older(self, names: Iterable[str]) -> bool:
        """Return whether a split is named as one of the data set that the samples were deleted from."""
        return self.deletion is not None and any(_is_of(name, self.deletion.name, self.split) for name in names)


def find_wanted(
    repository: Repository, keys: Iterable[str], *, data: str | None = None, split: str | None = None
) -> SampleQuery:
    """Return samples by their keys.

    Raises:
        ConfigError: `data` is no reference.
        CorruptDataError, UnavailableError: see `Log.read`.
    """
    tables = _tables_of(repository, data, split)
    return SampleQuery(tuple(dict.fromkeys(keys)), data, split, tables)


def find_deleted(
    repository: Repository, ref: str, *, data: str | None = None, split: str | None = None
) -> list[SampleQuery]:
    """Return the samples that a version of a data set deleted, split by split.

    Args:
        repository: with that version.
        ref: of it.
        data: a data set, or version, in which their keys mean the same samples, though it shares no shard.
        split: of this split only.

    Raises:
        NotFoundError: there is no such version, or none before it.
        ConfigError, CorruptDataError, UnavailableError: see `shards.diff`.
    """
    version = repository.resolve("datasets", ref)
    parent = repository.entry(version).content.get("parent")
    if parent is None and version.version == 1:
        raise NotFoundError(f"{version} is the first version of {version.name}: it deleted nothing")
    parent = parent or f"{version.name}@{version.version - 1}"
    splits = diff(repository, parent, str(version)).splits
    entries = repository.entries("datasets", version.name)
    tables = {entry.number: _split_tables(entry.content, f"{version.name}@{entry.number}") for entry in entries}
    known = frozenset(table for each in tables.values() for table in each.values())
    found = []
    for name, each in splits.items():
        if split in {None, name} and len(each.deleted):
            before = {own[name] for number, own in tables.items() if number < version.version and name in own}
            shards = frozenset(
                shard.digest
                for table in read_tables(repository.objects, before).values()
                if table is not None
                for shard in table.shards()
            )
            deletion = Deletion(str(version), version.name, known, shards)
            found.append(SampleQuery(tuple(each.deleted), data, name, _tables_of(repository, data, name), deletion))
    return found


def read_tables(objects: Objects, digests: Iterable[Digest]) -> dict[Digest, ShardTable | None]:
    """Return shard tables, None for those that are not here. Raises CorruptDataError, UnavailableError."""

    def read(digest: Digest) -> ShardTable | None:
        try:
            return ShardTable.decode(objects.read(digest), objects.location(digest))
        except NotFoundError:
            return None

    wanted = sorted(set(digests))
    with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="datasvc-tables") as pool:
        return dict(zip(wanted, pool.map(read, wanted), strict=True))


def _tables_of(repository: Repository, data: str | None, split: str | None) -> frozenset[Digest] | None:
    """Return the shard tables of a version of a data set; None where `data` names all of them, or is not here."""
    wanted = None if data is None else parse_reference(data)
    if data is None or wanted is None or (wanted.version is None and wanted.tag is None):
        return None
    try:
        version = repository.resolve("datasets", data)
    except NotFoundError:
        return None
    tables = _split_tables(repository.entry(version).content, str(version))
    return frozenset(table for name, table in tables.items() if split in {None, name})


def _split_tables(entry: Mapping[str, Any], version: str) -> dict[str, Digest]:
    try:
        return {str(name): parse_digest(split["table"]) for name, split in entry["splits"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(f"the entry of {version} does not say what its splits are: {error!r}") from error


def _is_of(name: str, data: str | None, split: str | None) -> bool:
    version, _, own_split = name.rpartition("/")
    return split in {None, own_split} and data in {None, version, version.partition("@")[0]}
