"""A data-set version open for reading: its splits, and any sample by its number."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from datasvc.errors import NotFoundError
from datasvc.keyed_random import Integers
from datasvc.repository import Digest, Entry, ObjectInfo, Repository, Resolved
from datasvc.repository.objects.objects import parse_digest
from datasvc.shards.format.reader import Shard, open_shard
from datasvc.shards.format.shard_table import ShardTable
from datasvc.shards.versions.deletions import Deletions, load_deletions

# Shards that random access keeps open, in memory where the repository is remote.
_OPEN_SHARDS = 4


@dataclass(frozen=True, eq=False)
class ShardRequest:
    """Samples of one shard that a reader needs next.

    Attributes:
        info: the shard.
        index: its sample index, None where it has none.
        rows: `int64[n]`, rows of the shard's file.
    """

    info: ObjectInfo
    index: Digest | None
    rows: Integers


class ShardStore(Protocol):
    """Where readers get shards from: straight from the repository, or a node's cache."""

    def open_shard(self, info: ObjectInfo) -> Shard:
        """Return the shard, verified; it stays readable for as long as it is referenced."""

    def release_shard(self, info: ObjectInfo) -> None:
        """Say that the caller has no more use for a shard that it opened."""

    def open_early(self, wanted: Sequence[ShardRequest]) -> Mapping[Digest, Shard]:
        """Return shards that are still to come, but whose wanted samples can be read already; {} when none.

        They are not to be released, and good for these samples only: the next call may give the whole.
        """

    def advance(self, epoch: int, position: int) -> None:
        """Say that everything before a position of the order was served; a store that knows the order plans by it."""


class OriginShards:
    """Shards straight from a repository: mapped where it is local, read into memory where it is not.

    Every shard is checked against its digest when this process opens it first.

    Args:
        repository: where the objects are.
    """

    def __init__(self, repository: Repository) -> None:
        self._objects = repository.objects
        self._verified: set[str] = set()

    def open_shard(self, info: ObjectInfo) -> Shard:
        """Return the shard. Raises CorruptDataError, NotFoundError, UnavailableError."""
        path = self._objects.local_path(info.digest)
        if path is not None and info.digest in self._verified:
            return Shard.map(path)
        shard = open_shard(self._objects, info)
        self._verified.add(info.digest)
        return shard

    def release_shard(self, info: ObjectInfo) -> None:
        """Nothing to do: the mapping goes with the last reference."""

    def open_early(self, wanted: Sequence[ShardRequest]) -> Mapping[Digest, Shard]:  # noqa: ARG002 - see `ShardStore`
        """Return {}: there is nothing to wait for."""
        return {}

    def advance(self, epoch: int, position: int) -> None:
        """Nothing to do: shards are where they are."""


class Split:
    """The samples of one split that are not deleted; `split[5]` is a dict, `len(split)` their number.

    Args:
        name: such as "train".
        dataset: the version it belongs to, "digits@1".
        repository: where its objects are.
        digest: of its shard table: the identity of its samples and their shards.
    """

    def __init__(self, name: str, dataset: str, repository: Repository, digest: str) -> None:
        self.name = name
        self.dataset = dataset
        self.repository = repository
        self.digest = parse_digest(digest)
        self.origin = OriginShards(repository)
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        # Small enough to send to any worker: the table and open shards are read again there.
        return {
            "name": self.name,
            "dataset": self.dataset,
            "repository": self.repository.url,
            "digest": self.digest,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        repository = Repository.open(state["repository"])
        self.__init__(state["name"], state["dataset"], repository, state["digest"])  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"Split({self.dataset}/{self.name}, {len(self)} samples)"

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return sample `number` in table order as Python values; blobs as bytes, None for what it lacks.

        Raises:
            IndexError: out of range; negative numbers count from the end.
            CorruptDataError, NotFoundError, UnavailableError: see `OriginShards.open_shard`.
        """
        wanted = number + len(self) if number < 0 else number
        if not 0 <= wanted < len(self):
            raise IndexError(f"sample {number} is outside 0..{len(self) - 1} of {self.dataset}/{self.name}")
        shard = int(np.searchsorted(self._stops, wanted, side="right"))
        row = wanted - (int(self._stops[shard - 1]) if shard else 0)
        (stored,) = self.stored_rows(shard, np.array([row])).tolist()
        found = self._open_shard(shard).sample(stored)
        return {name: found.get(name) for name in self.table.sample_schema.names}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))

    @cached_property
    def table(self) -> ShardTable:
        """The split's shards. Raises CorruptDataError, NotFoundError, UnavailableError."""
        objects = self.repository.objects
        return ShardTable.decode(objects.read(self.digest), objects.location(self.digest))

    def stored_rows(self, shard: int, rows: Integers) -> Integers:
        """Return where a shard's file holds the samples that the access order means.

        Args:
            shard: number in the table.
            rows: `int64[n]`, counted over the samples of the shard that are not deleted.

        Returns:
            `int64[n]`, counted over all samples of the file; `rows` itself where none is deleted.

        Raises:
            CorruptDataError, NotFoundError, UnavailableError: the deletions cannot be read.
        """
        return self.deletions.kept_rows(shard)[rows] if self._deleted[shard] else rows

    @cached_property
    def deletions(self) -> Deletions:
        """Which samples are deleted. Raises as `load_deletions`."""
        return load_deletions(self.repository.objects, self.table)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels, index by index; empty without labels."""
        return self.table.classes

    @cached_property
    def _deleted(self) -> Integers:
        return self.table.deleted_per_shard

    @cached_property
    def _stops(self) -> Any:
        return np.cumsum(self.table.samples_per_shard)

    def _open_shard(self, number: int) -> Shard:
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
            else:
                self._open[number] = self.origin.open_shard(self.table.shard(number))
                while len(self._open) > _OPEN_SHARDS:
                    self._open.popitem(last=False)
            return self._open[number]


class DatasetVersion(Mapping[str, Split]):
    """One version of a data set: a mapping from split names to splits.

    Args:
        repository: where it lies.
        resolved: which version.
        entry: its log entry.
    """

    def __init__(self, repository: Repository, resolved: Resolved, entry: Entry) -> None:
        self.repository = repository
        self.resolved = resolved
        self.entry = entry
        self._splits = {
            name: Split(name, str(resolved), repository, split["table"])
            for name, split in sorted(entry.content["splits"].items())
        }

    def __getitem__(self, split: str) -> Split:
        """Return a split. Raises NotFoundError, naming those that exist."""
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
    """Return the version that `ref` means now.

    Raises:
        ConfigError, NotFoundError, UnavailableError: see `Repository.resolve`.
        CorruptDataError: its entry was changed.
    """
    resolved = repository.resolve("datasets", ref)
    return DatasetVersion(repository, resolved, repository.entry(resolved))


def choose_split(dataset: DatasetVersion, split: str | None) -> list[Split]:
    """Return the named split, or all of them for None. Raises NotFoundError."""
    return [dataset[split]] if split is not None else list(dataset.values())
