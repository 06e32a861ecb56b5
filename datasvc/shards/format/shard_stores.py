"""Shard stores: through them readers open the shards of a table, from the repository or a node's cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from datasvc.errors import DatasvcError
from datasvc.keyed_random import Integers
from datasvc.repository import Digest, ObjectInfo, Objects, Repository
from datasvc.shards.format.overlaid_shard import overlaid
from datasvc.shards.format.reader import Shard, open_shard
from datasvc.shards.format.shard_table import ShardTable


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

    def objects(self, table: ShardTable) -> Objects:
        """Return the objects from which values beside the shards of a table are read, see `overlaid`."""

    def open_early(self, requests: Sequence[ShardRequest]) -> Mapping[Digest, Shard]:
        """Return shards that are not complete yet, but already have the requested samples; {} for none.

        Only the requested samples of such a shard can be read. Do not call `release_shard` for it. A later call may
        return the same shard complete.
        """

    def advance(self, epoch: int, position: int) -> None:
        """Report that all samples before a position of an epoch were served, so that the store can plan fetches."""


def open_listed_shard(store: ShardStore, objects: Objects, table: ShardTable, number: int) -> Shard:
    """Return a shard of a split, opened by `store`, with its overlay and after a check against the shard table.

    Raises:
        CorruptDataError: see `ShardTable.check_shard`, or an overlay is corrupt; the shard is released.
        CacheFullError, NotFoundError, UnavailableError: see `ShardStore.open_shard`.
    """
    info = table.shard(number)
    shard = store.open_shard(info)
    try:
        return overlaid(objects, table, number, shard)
    except DatasvcError:
        store.release_shard(info)
        raise


class OriginShards:
    """A `ShardStore` that reads straight from a repository: local shards are mapped, remote ones read into memory.

    Each shard is checked against its digest when this process opens it for the first time.
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
        # An attached shard has no file: it is built, and verified, each time.
        if path is None or path.exists():
            self._verified.add(info.digest)
        return shard

    def release_shard(self, info: ObjectInfo) -> None:
        """Do nothing: the mapping ends with the last reference to the shard."""

    def objects(self, table: ShardTable) -> Objects:  # noqa: ARG002 - see `ShardStore`
        """Return the objects of the repository."""
        return self._objects

    def open_early(self, requests: Sequence[ShardRequest]) -> Mapping[Digest, Shard]:  # noqa: ARG002 - see `ShardStore`
        """Return {}: shards of a repository are always complete."""
        return {}

    def advance(self, epoch: int, position: int) -> None:
        """Do nothing: no shard is fetched ahead."""
