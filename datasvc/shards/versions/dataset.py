"""Read access to a data-set version: its splits, single samples by number, and the interface of shard stores."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np
import pyarrow as pa

from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.keyed_random import Integers
from datasvc.printable import count_text
from datasvc.repository import Digest, Entry, ObjectInfo, Repository, Resolved, Storage, parse_reference
from datasvc.repository.objects.objects import parse_digest
from datasvc.repository.resolved import keep_valid
from datasvc.shards.format.reader import Shard, open_shard
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.lines.commit import ancestors_of, check_splits, newest_entries, renamed_to
from datasvc.shards.lines.dataset_log import DatasetLog
from datasvc.shards.versions.deletions import Deletions, load_deletions
from datasvc.shards.versions.samples import Sample, choose_columns, image_columns, read_columns
from datasvc.shown import Shown, to_frame

if TYPE_CHECKING:
    import pandas as pd

# Number of shards that random access keeps open. An open shard of a remote repository is held in memory.
_MAX_OPEN_SHARDS = 4


@dataclass(frozen=True, eq=False)
class ShardRequest:
    """The samples of one shard that a reader needs next.

    Attributes:
        info: digest and size of the shard.
        index: digest of its sample index; None for a shard without one.
        rows: `int64[n]`, row numbers in the shard's file.
    """

    info: ObjectInfo
    index: Digest | None
    rows: Integers


class ShardStore(Protocol):
    """Interface through which readers open shards: the repository itself, or a node's cache in front of it."""

    def open_shard(self, info: ObjectInfo) -> Shard:
        """Return the shard, verified. The caller calls `release_shard` once it no longer needs it."""

    def release_shard(self, info: ObjectInfo) -> None:
        """Allow the store to drop its copy of a shard. Data that the caller still references stay readable."""

    def open_early(self, requests: Sequence[ShardRequest]) -> Mapping[Digest, Shard]:
        """Return shards that are not complete yet, but already have the requested samples; {} for none.

        Only the requested samples of such a shard can be read. Do not call `release_shard` for it. A later call may
        return the same shard complete.
        """

    def advance(self, epoch: int, position: int) -> None:
        """Report that all samples before a position of an epoch were served, so that the store can plan fetches."""


def open_listed_shard(store: ShardStore, table: ShardTable, number: int) -> Shard:
    """Return a shard of a split, opened by `store`, after a check against the split's shard table.

    Raises:
        CorruptDataError: see `ShardTable.check_shard`; the shard is released.
        CacheFullError, NotFoundError, UnavailableError: see `ShardStore.open_shard`.
    """
    info = table.shard(number)
    shard = store.open_shard(info)
    try:
        return table.check_shard(number, shard)
    except CorruptDataError:
        store.release_shard(info)
        raise


class OriginShards:
    """A `ShardStore` that reads straight from a repository: local shards are mapped, remote ones read into memory.

    Each shard is checked against its digest when this process opens it for the first time.

    Args:
        repository: the repository that stores the shards.
    """

    def __init__(self, repository: Repository) -> None:
        self._objects = repository.objects
        self._verified: set[str] = set()  # digests of the shards that this process has checked

    def open_shard(self, info: ObjectInfo) -> Shard:
        """Return the shard. Raise CorruptDataError, NotFoundError, UnavailableError."""
        path = self._objects.local_path(info.digest)
        # Stored bytes never change, so a shard that this process has verified is mapped without another check.
        if path is not None and info.digest in self._verified:
            return Shard.map(path)
        shard = open_shard(self._objects, info)
        self._verified.add(info.digest)
        return shard

    def release_shard(self, info: ObjectInfo) -> None:
        """Do nothing: the mapping ends with the last reference to the shard."""

    def open_early(self, requests: Sequence[ShardRequest]) -> Mapping[Digest, Shard]:  # noqa: ARG002 - see `ShardStore`
        """Return {}: shards of a repository are always complete."""
        return {}

    def advance(self, epoch: int, position: int) -> None:
        """Do nothing: no shard is fetched ahead."""


class Split(Shown):
    """The live (not deleted) samples of one split: `split[5]` is a sample as a dict; `len(split)` counts them.

    Args:
        name: name of the split, such as "train".
        dataset: the version it belongs to, such as "digits@1".
        repository: the repository that stores its objects.
        digest: digest of its shard table; it identifies the samples and their shards.
    """

    def __init__(self, name: str, dataset: str, repository: Repository, digest: str) -> None:
        self.name = name
        self.dataset = dataset
        self.repository = repository
        self.digest = parse_digest(digest)
        self.origin = OriginShards(repository)
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process receives no open files: it opens the repository and the shards with clients of its own.
        return _unpickle_split, (self.name, self.dataset, self.repository.storage, self.digest)

    def __repr__(self) -> str:
        return f"Split({self.dataset}/{self.name}, {count_text(len(self), 'sample')})"

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    @overload
    def __getitem__(self, number: int) -> Sample: ...
    @overload
    def __getitem__(self, number: slice) -> list[Sample]: ...

    def __getitem__(self, number: int | slice) -> Sample | list[Sample]:
        """Return sample `number` as Python values: blobs as bytes, None for a missing column.

        Live samples are numbered in the order of the shard table. A slice, such as `split[0:2]`, returns a list.

        Raises:
            IndexError: `number` is out of range; negative numbers count from the end.
            CorruptDataError, NotFoundError, UnavailableError: see `OriginShards.open_shard`.
        """
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        live_number = number + len(self) if number < 0 else number
        if not 0 <= live_number < len(self):
            raise IndexError(f"sample {number} is outside 0..{len(self) - 1} of {self.dataset}/{self.name}")
        shard = int(np.searchsorted(self._stops, live_number, side="right"))
        start = int(self._stops[shard - 1]) if shard else 0
        (stored_row,) = self.stored_rows(shard, np.array([live_number - start])).tolist()
        sample = self._open_shard(shard).sample(stored_row)
        values = {name: sample.get(name) for name in self.table.sample_schema.names}
        return Sample.of(values, self._image_columns, self.classes)

    def __iter__(self) -> Iterator[Sample]:
        return (self[number] for number in range(len(self)))

    def to_arrow(self, columns: Sequence[str] | None = None, *, num_samples: int | None = None) -> pa.Table:
        """Return columns of the first live samples as an Arrow table; all of it is in memory.

        Args:
            columns: names of the columns; None for all but blobs.
            num_samples: maximum number of samples; None for all.

        Raises:
            NotFoundError: there is no such column, or a shard is missing.
            CorruptDataError, UnavailableError: see `OriginShards.open_shard`.
        """
        schema = choose_columns(self.table.sample_schema, columns)
        wanted = len(self) if num_samples is None else min(num_samples, len(self))
        counts = np.diff(np.minimum(self._stops, wanted), prepend=0)  # samples to read of each shard
        shards = (
            (self._open_shard(number), self.stored_rows(number, np.arange(counts[number])))
            for number in np.flatnonzero(counts).tolist()
        )
        return read_columns(shards, schema)

    def to_pandas(self, columns: Sequence[str] | None = None, *, num_samples: int | None = None) -> pd.DataFrame:
        """Return `to_arrow` as a pandas frame. Raises its errors, and ConfigError if pandas is not installed."""
        return to_frame(self.to_arrow(columns, num_samples=num_samples))

    @cached_property
    def table(self) -> ShardTable:
        """The table of the split's shards. Raises CorruptDataError, NotFoundError, UnavailableError."""
        objects = self.repository.objects
        return ShardTable.decode(objects.read(self.digest), objects.location(self.digest))

    def stored_rows(self, shard: int, rows: Integers) -> Integers:
        """Return the row numbers of live samples in their shard's file, which has the deleted samples too.

        Args:
            shard: number of the shard in the table.
            rows: `int64[n]`, row numbers among the live samples of the shard, as the access order counts them.

        Returns:
            `int64[n]`, row numbers among all samples of the file; `rows` itself if the shard has no deletions.

        Raises:
            CorruptDataError, NotFoundError, UnavailableError: the deletions cannot be read.
        """
        # Deletions are read only if the shard has any.
        return self.deletions.kept_rows(shard)[rows] if self._num_deleted[shard] else rows

    @cached_property
    def deletions(self) -> Deletions:
        """The deleted samples. Raises what `load_deletions` raises."""
        return load_deletions(self.repository.objects, self.table)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; label i belongs to `classes[i]`. Empty for a split without class names."""
        return self.table.classes

    @cached_property
    def _image_columns(self) -> tuple[str, ...]:
        return image_columns(self.table.sample_schema)

    @cached_property
    def _num_deleted(self) -> Integers:  # per shard; cached, because the table computes it at each call
        return self.table.deleted_per_shard

    @cached_property
    def _stops(self) -> Any:  # for each shard, the number of live samples in it and in all shards before it
        return np.cumsum(self.table.samples_per_shard)

    def _open_shard(self, number: int) -> Shard:
        """Return a shard of the table, from the few that stay open for random access."""
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
            else:
                self._open[number] = open_listed_shard(self.origin, self.table, number)
                # The least recently used shard is dropped first.
                while len(self._open) > _MAX_OPEN_SHARDS:
                    self._open.popitem(last=False)
            return self._open[number]


def _unpickle_split(name: str, dataset: str, storage: Storage, digest: str) -> Split:
    return Split(name, dataset, Repository(storage), digest)


class DatasetVersion(Shown, Mapping[str, Split]):
    """One version of a data set: a mapping from split names to splits.

    Args:
        repository: the repository that stores it.
        resolved: name and number of the version.
        entry: its log entry.

    Raises:
        CorruptDataError: the entry has no valid list of splits.
    """

    def __init__(self, repository: Repository, resolved: Resolved, entry: Entry) -> None:
        self.repository = repository
        self.resolved = resolved
        self.entry = entry
        descriptions = check_splits(entry.content, resolved)
        self._splits = {
            name: Split(name, str(resolved), repository, split["table"])
            for name, split in sorted(descriptions.items())
        }

    def __getitem__(self, split: str) -> Split:
        """Return the split of this name. Raise NotFoundError, which lists the existing splits, if there is none."""
        if split not in self._splits:
            raise NotFoundError(f"{self.resolved} has no split {split!r}; it has: {', '.join(self._splits)}")
        return self._splits[split]

    def __contains__(self, split: object) -> bool:
        return split in self._splits

    def __iter__(self) -> Iterator[str]:
        return iter(self._splits)

    def __len__(self) -> int:
        return len(self._splits)

    def __repr__(self) -> str:
        return f"Dataset({self.resolved}, {dict(self._splits)})"


def open_dataset(repository: Repository, ref: str) -> DatasetVersion:
    """Return the version that `ref` currently resolves to.

    Raises:
        ConfigError, NotFoundError, UnavailableError: see `Repository.resolve`.
        CorruptDataError: the log entry of the version is corrupt.
    """
    return read_version(repository, repository.resolve("datasets", ref))


def read_version(repository: Repository, resolved: Resolved) -> DatasetVersion:
    """Return a resolved version, even a removed one.

    Raises:
        NotFoundError: the entry records that the data set was renamed.
        CorruptDataError, UnavailableError: see `Repository.entry`.
    """
    entry = repository.entry(resolved)
    if new_name := renamed_to(entry):
        raise NotFoundError(f"{resolved.name} was renamed to {new_name}; use the new name")
    return DatasetVersion(repository, resolved, entry)


def find_renamed(repository: Repository, version: Resolved) -> Resolved | None:
    """Return a removed version by the present name of its data set; None if the data set was not renamed since.

    Raises:
        CorruptDataError, UnavailableError: see `Repository.entry`.
    """
    content = repository.entry(version).content
    names = [version.name]
    for name in names:  # grows by each name that the data set had next
        log = repository.versions("datasets", name)
        later, _ = log.try_entries(range(version.version + 1, log.head() + 1))
        for new_name in filter(None, map(renamed_to, later)):
            renamed = Resolved("datasets", new_name, version.version)
            # A rename copies entries byte by byte. If the new name has no such entry, the rename was taken back.
            with suppress(NotFoundError, CorruptDataError):
                if new_name in names or repository.entry(renamed).content != content:
                    continue
                if not repository.removals("datasets", new_name).removed([version.version]):
                    return renamed
                names.append(new_name)
    return None


def list_datasets(repository: Repository) -> list[DatasetVersion]:
    """Return the newest version of every data set, of its main line, sorted by name; see `newest_entries`."""
    return [DatasetVersion(repository, resolved, entry) for resolved, entry in newest_entries(repository)]


def readable_versions(repository: Repository, name: str, *, last: int | None = None) -> DatasetLog:
    """Return the entries of the `last` newest versions of a data set (None: all), oldest first, with removed ones.

    The versions are those of all branches; of NAME@BRANCH, its head and the ancestors of this version.

    An entry that cannot be read, or has no valid splits, is left out with an `UnreadableVersionWarning`. For errors,
    see `Repository.entries`, and `ancestors_of` for a branch.
    """
    reference = parse_reference(name)
    if reference.tag is None or reference.tag not in repository.branches(reference.name):
        entries = repository.entries("datasets", name, last=last)
    else:
        numbers = islice(ancestors_of(repository, repository.resolve("datasets", name)), last)
        entries = repository.readable_entries("datasets", reference.name, sorted(numbers))
    valid = keep_valid("datasets", reference.name, entries, check_splits)
    return DatasetLog(reference.name, valid, repository)


def choose_split(dataset: DatasetVersion, split: str | None) -> list[Split]:
    """Return the named split, or all splits for None. Raise NotFoundError if there is no such split."""
    return [dataset[split]] if split is not None else list(dataset.values())
