"""Shard stores: through them readers open the shards of a table, from the repository or a node's cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final, Protocol

from datasvc.errors import DatasvcError
from datasvc.keyed_random import Integers
from datasvc.repository import Digest, ObjectInfo, Objects, Repository
from datasvc.shards.format.overlaid_shard import overlaid
from datasvc.shards.format.partial_reader import PartialShard, open_partial
from datasvc.shards.format.reader import Shard, open_shard
from datasvc.shards.format.shard_table import ShardTable
from datasvc.threads import map_in_threads

_MAX_REQUESTS: Final = 16  # at once
_MAX_IN_PARTS: Final = 256  # shards that are open: each has its sample index in memory
_MAX_OTHER_BYTES: Final = 512 << 20  # of blobs without parts, of all shards that are open


@dataclass(frozen=True, eq=False)
class ShardRequest:
    """The samples of one shard that a reader needs next.

    Attributes:
        info: digest and size of the shard.
        index: digest of its sample index; None for a shard without one.
        rows: `int64[n]`, row numbers in the shard's file.
        in_parts: whether large blobs are read by `Shard.reader`.
    """

    info: ObjectInfo
    index: Digest | None
    rows: Integers
    in_parts: bool = False


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

    Each shard is checked against its digest when this process opens it for the first time. A remote shard that has
    mostly large blobs is not read as a whole for a request of `in_parts`.
    """

    def __init__(self, repository: Repository) -> None:
        self._objects = repository.objects
        self._verified: set[str] = set()  # digests of the shards that this process has checked
        self._lock = Lock()
        # Shards that are read in parts, with the bytes of their other blobs in memory; None: read as a whole. Those
        # that were used last are at the end.
        self._in_parts: dict[Digest, tuple[PartialShard | None, int]] = {}

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

    def open_early(self, requests: Sequence[ShardRequest]) -> Mapping[Digest, Shard]:
        """Return the remote shards that have mostly large blobs, for requests of `in_parts`.

        The other blobs that a request needs are read. Raise CorruptDataError, NotFoundError, UnavailableError.
        """
        wanted = [] if self._objects.storage.is_local else [each for each in requests if each.in_parts]
        opened = map_in_threads(self._open_in_parts, wanted, _MAX_REQUESTS)
        return {each.info.digest: shard for each, shard in zip(wanted, opened, strict=True) if shard is not None}

    def _open_in_parts(self, request: ShardRequest) -> PartialShard | None:
        digest = request.info.digest
        with self._lock:
            known = self._in_parts.pop(digest, None)
        if known is not None:
            shard, num_bytes = known
        else:
            shard, num_bytes = open_partial(self._objects, request.info, request.index), 0
            if shard is not None and 2 * shard.parted_bytes < request.info.size_bytes:
                shard = None
            # An attached shard is not stored: it is built as a whole.
            if shard is not None and self._objects.storage.size(self._objects.path(digest)) is None:
                shard = None
        if shard is not None:
            shard.read_in_parts(self._objects)
            num_bytes += shard.fetch(self._objects, request.rows)
        with self._lock:
            self._in_parts[digest] = shard, num_bytes
            while len(self._in_parts) > _MAX_IN_PARTS or (
                len(self._in_parts) > 1 and sum(each for _, each in self._in_parts.values()) > _MAX_OTHER_BYTES
            ):
                del self._in_parts[next(iter(self._in_parts))]
        return shard

    def advance(self, epoch: int, position: int) -> None:
        """Do nothing: no shard is fetched ahead."""
