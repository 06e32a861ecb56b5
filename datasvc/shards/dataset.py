"""A data-set version open for reading: its splits, and any sample by its number."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.repository import Entry, ObjectInfo, Repository, Resolved
from datasvc.repository.objects import digest_of_file, parse_digest
from datasvc.shards.reader import Shard
from datasvc.shards.table import ShardTable

# Shards that random access keeps open, in memory where the repository is remote.
_OPEN_SHARDS = 4


class ShardStore(Protocol):
    """Where readers get shards from: straight from the repository, or a node's cache."""

    def open_shard(self, info: ObjectInfo) -> Shard:
        """Return the shard, verified; it stays readable for as long as it is referenced."""

    def release_shard(self, info: ObjectInfo) -> None:
        """Say that the caller has no more use for a shard that it opened."""


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
        if path is None:
            return Shard.from_bytes(self._objects.read(info.digest), self._objects.location(info.digest))
        shard = Shard.map(path) if info.digest in self._verified else self._open_verified(info)
        self._verified.add(info.digest)
        return shard

    def release_shard(self, info: ObjectInfo) -> None:
        """Nothing to do: the mapping goes with the last reference."""

    def _open_verified(self, info: ObjectInfo) -> Shard:
        path = self._objects.local_path(info.digest)
        assert path is not None
        try:
            found = digest_of_file(path)
        except FileNotFoundError as error:
            raise NotFoundError(f"shard {path} is missing; restore it from another copy") from error
        if found != info.digest:
            raise CorruptDataError(
                f"shard {path} is corrupt: its bytes hash to {found[:12]}...; restore it from another copy"
            )
        return Shard.map(path)


class Split:
    """The samples of one split; `split[5]` is a dict, `len(split)` their number.

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
        """Return sample `number` in table order as Python values; blobs as bytes.

        Raises:
            IndexError: out of range; negative numbers count from the end.
            CorruptDataError, NotFoundError, UnavailableError: see `OriginShards.open_shard`.
        """
        wanted = number + len(self) if number < 0 else number
        if not 0 <= wanted < len(self):
            raise IndexError(f"sample {number} is outside 0..{len(self) - 1} of {self.dataset}/{self.name}")
        shard = int(np.searchsorted(self._stops, wanted, side="right"))
        row = wanted - (int(self._stops[shard - 1]) if shard else 0)
        return self._open_shard(shard).sample(row)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))

    @cached_property
    def table(self) -> ShardTable:
        """The split's shards. Raises CorruptDataError, NotFoundError, UnavailableError."""
        objects = self.repository.objects
        return ShardTable.decode(objects.read(self.digest), objects.location(self.digest))

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels, index by index; empty without labels."""
        return self.table.classes

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


class Dataset(Mapping[str, Split]):
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


def open_dataset(repository: Repository, ref: str) -> Dataset:
    """Return the version that `ref` means now.

    Raises:
        ConfigError, NotFoundError, UnavailableError: see `Repository.resolve`.
        CorruptDataError: its entry was changed.
    """
    resolved = repository.resolve("datasets", ref)
    return Dataset(repository, resolved, repository.entry(resolved))


def choose_split(dataset: Dataset, split: str | None) -> list[Split]:
    """Return the named split, or all of them for None. Raises NotFoundError."""
    return [dataset[split]] if split is not None else list(dataset.values())
