"""The operations of one job on a node's cache: acquire, prefetch and release objects, and declare their next uses.

A job is a process that has the cache open, or one access order of such a process, with a clock of its own. Loaders
and the stager use a `CacheJob`; `Cache` adds the operations on the whole cache. The transactions of the catalogue
decide what is resident.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, Self

import numpy as np

from datasvc.cache.catalogue.catalogue import NoSpaceYet
from datasvc.cache.catalogue.next_use import bias_owned
from datasvc.cache.catalogue.tables import CatalogueTables
from datasvc.cache.peers.peers import Peers
from datasvc.cache.process_handle import CacheFolder, join_folder, leave_folder
from datasvc.cache.sources.remote_file import Store
from datasvc.errors import CacheFullError, ConfigError, UnavailableError
from datasvc.order import NextUse
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, ObjectInfo, Objects, Repository
from datasvc.repository.logs.redactions import redaction_log
from datasvc.shards.format.reader import Shard
from datasvc.shards.format.shard_stores import ShardRequest
from datasvc.shards.format.shard_table import ShardTable

Outcome = Literal["resident", "origin", "peer", "busy", "later"]
"""How an object became resident; "busy" and "later" mean that it did not, see `CacheJob.prefetch`."""

_RECORDS_PER_TRANSACTION = 1000


class Acquired(NamedTuple):
    """An object on which this process has a hold, a lock that prevents its eviction.

    Attributes:
        path: file of the object; it exists until the object is released.
        outcome: "resident" if the object was there already, otherwise its source: "origin" or "peer".
    """

    path: Path
    outcome: Outcome


class CacheJob:
    """One job on a node's cache. A `Cache` is the job of its process; `Cache.new_job` starts one for an access order.

    A job can be opened again by its id in other processes, such as the stager that fetches for an access order.

    Args:
        folder: folder of the cache.
        tenant: tenant whose quota is charged.
        peers: other nodes to read objects from before the origin; None: no other nodes.
        job_id: id of an access order's job, see `Cache.new_job`; None: the job of this process.

    Attributes:
        id: id of the job, under which the catalogue records its clock and its next uses.

    Raises:
        ConfigError, CorruptDataError, UnavailableError: see `Cache`.
    """

    def __init__(self, folder: Path, tenant: str, peers: Peers | None, job_id: str | None = None) -> None:
        self.folder = folder
        self.tenant = tenant
        self.peers = peers
        opened = join_folder(folder)
        self.id = job_id or opened.lease_id
        self._opened: CacheFolder | None = opened
        # `close` calls this finalizer; it also runs if this object is garbage-collected without `close`.
        self._leave = weakref.finalize(self, leave_folder, folder, opened)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r}, tenant={self.tenant!r})"

    @property
    def budget_bytes(self) -> int:
        """Limit of this tenant: the budget minus other tenants' guarantees, or its own maximum if that is lower."""
        return self._open().catalogue.read(CatalogueTables.account).available(self.tenant)

    def evict_retired(self, repository: Repository, further: Iterable[Digest] = ()) -> list[Digest]:
        """Evict the objects that purges have replaced or deleted; return those in use, which are deleted afterwards.

        Only of the redactions that this process has read, such as with a shard table: the log is not read here.
        `further` are other objects to evict.
        """
        known = redaction_log(repository.objects).known
        retired = {*known.retired, *known.deleted, *further}
        return self._open().catalogue.evict(retired) if retired else []

    def acquire(self, info: ObjectInfo, repository: Store, progress: Progress = NO_PROGRESS) -> Acquired:
        """Make an object resident, and add a hold on it until `release`.

        Args:
            info: the object.
            repository: origin of the object: a repository, or a remote file.
            progress: counts the bytes by source; those of a resident object as "resident".

        Raises:
            CacheFullError: the budget has no space for the object, or the disk is full and nothing can be evicted.
            CorruptDataError: every source sent wrong bytes; the origin was read twice.
            NotFoundError, UnavailableError: see `Fetcher.fetch`.
            ConfigError: this cache is closed, or was opened before a fork.
        """
        name, outcome = self.hold(info, repository, progress)
        return Acquired(Path(name), outcome)

    def hold(self, info: ObjectInfo, repository: Store, progress: Progress = NO_PROGRESS) -> tuple[str, Outcome]:
        """Like `acquire`, but return the path as text, because creating a `Path` takes longer than opening a file."""
        opened = self._open()
        # The hold comes before the look-up: no process can evict an object between the look-up and its use.
        opened.locks.acquire(info.digest)
        try:
            if opened.catalogue.is_ready(info):
                opened.count_hit()  # in memory, until the next release: a hit writes nothing to the catalogue
                outcome: Outcome = "resident"
            else:
                outcome = self._fetch(opened, info, repository, progress)
            if outcome == "resident":
                progress.advance(info.size_bytes, source="resident")
        except BaseException:
            opened.locks.release(info.digest)
            raise
        return opened.files.object_name(info.digest), outcome

    def prefetch(self, info: ObjectInfo, repository: Store, reuse: NextUse, *, evict: bool = True) -> Outcome:
        """Make an object resident before its use, without a hold, and without waiting for other fetches.

        Args:
            info: the object.
            repository: origin of the object: a repository, or a remote file.
            reuse: next use of the object; objects that are needed sooner are not evicted for it.
            evict: whether to evict objects that a running job may need again; False: only those that no job needs.

        Returns:
            "resident", "origin" or "peer": see `Acquired`. "busy": another thread or process fetches the object.
            "later": nothing was done, because the fetch would evict objects that are needed sooner.

        Raises:
            CacheFullError, CorruptDataError, NotFoundError, UnavailableError, ConfigError: see `acquire`.
        """
        opened = self._open()
        if opened.catalogue.is_ready(info):
            return "resident"
        return self._fetch(opened, info, repository, prefetch=reuse, evict=evict)

    def release(self, digest: Digest, reuse: NextUse | None = None) -> None:
        """Remove one hold of this process; an object without holds may be evicted.

        Args:
            digest: the object.
            reuse: next use by this job; None: unknown. It is recorded under the condition of `expect`.

        Raises:
            ConfigError: this process has no hold on the object.
        """
        opened = self._open()
        if not opened.locks.count(digest):
            raise ConfigError(f"object {digest} cannot be released: it was not acquired, or was released already")
        try:
            # Written before the hold is removed: an eviction right after the removal must see the next use.
            opened.catalogue.release(digest, self.id, reuse, opened.take_hits())
        finally:
            opened.locks.release(digest)

    def expect(self, next_uses: Mapping[Digest, int], now: int, *, passed_only: bool = False) -> None:
        """Declare the next uses of objects by this job. Objects without a file are skipped.

        The catalogue records one job for each object, with its next use. This job is not recorded if another running
        job needs the object equally soon, or sooner.

        Args:
            next_uses: next use of each object, in bytes on the job's clock, see `NextUse`.
            now: current value of the job's clock, in bytes.
            passed_only: skip objects for which this job has recorded a next use that has not passed at `now`.
        """
        catalogue, remaining = self._open().catalogue, iter(next_uses.items())
        # Several short transactions: a write transaction blocks the writes of all other processes.
        while chunk := dict(islice(remaining, _RECORDS_PER_TRANSACTION)):
            catalogue.expect(chunk, self.id, now, passed_only=passed_only)

    @contextmanager
    def resident(self, digest: Digest) -> Iterator[Path | None]:
        """Yield the file of a resident, verified object, with a hold inside the block; None if it is not resident."""
        opened = self._open()
        opened.locks.acquire(digest)
        try:
            record = opened.catalogue.read(lambda tables: tables.get(digest))
            is_ready = record is not None and opened.catalogue.is_ready(ObjectInfo(digest, record.size_bytes))
            yield opened.files.object_path(digest) if is_ready else None
        finally:
            opened.locks.release(digest)

    def is_resident(self, info: ObjectInfo) -> bool:
        """Return whether an object can be acquired without a fetch. Raises ConfigError in a forked child."""
        return self._open().catalogue.is_ready(info)

    def count(self, name: str, number: int) -> None:
        """Add to a counter of the cache."""
        self._open().catalogue.count({name: number})

    def abandon(self, held: Counter[Digest]) -> None:
        """Release holds whose user was garbage-collected; do nothing in a forked child. For finalizers: never blocks.

        Args:
            held: number of holds to release, by object.
        """
        if self._opened is not None and self._opened.process == os.getpid():
            self._opened.locks.abandon(held.elements())

    def end(self) -> None:
        """Mark the job as ended: its objects are evicted first. Ending it again does nothing."""
        self._open().catalogue.retire(self.id)

    def close(self) -> None:
        """Close this handle. Holds stay until they are released; closing again does nothing."""
        self._opened = None
        self._leave()

    def __reduce__(self) -> tuple[type[CacheJob], tuple[Path, str, Peers | None, str]]:
        """Pickle as the arguments that open the job again, in another process."""
        return CacheJob, (self.folder, self.tenant, self.peers, self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _open(self) -> CacheFolder:
        if self._opened is None:
            raise ConfigError(f"the cache {self.folder} was closed; open it again")
        self._opened.check_process()
        return self._opened

    def _fetch(
        self,
        opened: CacheFolder,
        info: ObjectInfo,
        repository: Store,
        progress: Progress = NO_PROGRESS,
        *,
        prefetch: NextUse | None = None,
        evict: bool = True,
    ) -> Outcome:
        """Make an object resident. Without `prefetch`, its next use, wait for other fetches until it is."""
        catalogue, files = opened.catalogue, opened.files
        try:
            while True:
                reservation = catalogue.reserve(info, self.id, self.tenant, prefetch=prefetch, evict=evict)
                if isinstance(reservation, NoSpaceYet):
                    # Other fetches hold the space, and each of them ends. Then the next reservation succeeds, names
                    # another fetch, or raises CacheFullError if none is left.
                    files.wait_for_incoming(reservation.digest)
                elif reservation == "busy" and prefetch is None:
                    files.wait_for_incoming(info.digest)
                elif reservation != "reserved":
                    return reservation
                else:
                    break
            # The file may exist: a scan found it, or a process published it and was killed before its commit.
            is_published = opened.fetcher.is_intact(info.digest)
            outcome: Outcome = "resident"
            counts = {"hits": 1}
            if not is_published:
                outcome, counts = opened.fetcher.fetch(info, repository, self.peers, progress)
            catalogue.complete(info.digest, self.id, publish=not is_published, reuse=prefetch, counts=counts)
            files.unlock(info.digest)
        except OSError as error:
            raise UnavailableError(
                f"cannot write to the cache {self.folder}: {error}; check its disk and its permissions"
            ) from error
        finally:
            # Also after an error, or an interrupt at any line: a reservation must not outlive this call.
            if files.is_locked_by_this_thread(info.digest):
                try:
                    # A failure of `drop` would hide the first error. Without its lock, a reservation is void anyway.
                    with suppress(UnavailableError):
                        catalogue.drop(info.digest, self.id)
                finally:
                    files.unlock(info.digest)
        return outcome


class CachedObjects(Objects):
    """Objects of a repository, of which those in `cached` are read through a node's cache, for one job."""

    def __init__(self, job: CacheJob, repository: Repository, cached: Mapping[Digest, ObjectInfo]) -> None:
        super().__init__(repository.storage)
        self._job, self._repository, self._cached = job, repository, cached

    def read(self, digest: Digest, max_bytes: int | None = None) -> bytes:
        """Return the same as `Objects.read`."""
        if digest not in self._cached:
            return super().read(digest, max_bytes)
        return self.read_range(digest, 0, self._cached[digest].size_bytes)

    def read_range(self, digest: Digest, offset: int, length: int) -> bytes:
        """Return the same as `Objects.read_range`."""
        if digest not in self._cached:
            return super().read_range(digest, offset, length)
        try:
            path, _ = self._job.hold(self._cached[digest], self._repository)
        except CacheFullError:  # pins and other jobs left no space
            return super().read_range(digest, offset, length)
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                return file.read(length)
        finally:
            self._job.release(digest)


class CachedShards:
    """A `ShardStore` of one repository that reads through a node's cache, for one job.

    Shards that were not released are released when this object is garbage-collected; `job` stays open until then.
    """

    def __init__(self, job: CacheJob, repository: Repository) -> None:
        self._job = job
        self._repository = repository
        job.evict_retired(repository)
        self._held: Counter[Digest] = Counter()  # number of holds (locks against eviction) on each shard
        # The finalizer refers to the job, which therefore stays open until the holds are released.
        weakref.finalize(self, job.abandon, self._held)

    def open_shard(self, info: ObjectInfo) -> Shard:
        """Return the shard, mapped from the cache; it is not evicted before `release_shard`.

        Raises:
            CacheFullError, CorruptDataError, NotFoundError, UnavailableError: see `CacheJob.acquire`.
        """
        return self.open(info)[0]

    def open(self, info: ObjectInfo) -> tuple[Shard, Outcome]:
        """Return the shard as `open_shard` does, and its outcome: "resident", "origin" or "peer"."""
        name, outcome = self._job.hold(info, self._repository)
        self._held[info.digest] += 1
        try:
            return Shard.map(name), outcome
        except BaseException:
            self.release_shard(info)
            raise

    def release_shard(self, info: ObjectInfo, reuse: NextUse | None = None) -> None:
        """Allow the shard to be evicted when space is needed; existing views of it stay readable.

        Args:
            info: the shard.
            reuse: next use of the shard by this job; None: unknown.
        """
        peers = self._job.peers
        if reuse is not None and peers is not None and peers.num_nodes > 1:
            # A node keeps the objects that it owns longer than others, because other nodes request them from it.
            owned = np.array([peers.owns(info.digest)])
            biased = bias_owned(np.array([reuse.next_use]), owned)
            reuse = NextUse(reuse.now, int(biased[0]))
        self._job.release(info.digest, reuse)
        self._held[info.digest] -= 1

    def objects(self, table: ShardTable) -> Objects:
        """Return the objects to read values beside the shards from: through the cache, if it can hold the split."""
        # One pack has values of many shards. A cache that evicts would fetch it again for each of them, so if it
        # cannot hold the split, values are read by range from the repository.
        objects = table.overlays.value_objects()
        size_bytes = table.size_bytes + sum(info.size_bytes for info in objects.values())
        is_held = objects and size_bytes <= self._job.budget_bytes
        return CachedObjects(self._job, self._repository, objects) if is_held else self._repository.objects

    def is_resident(self, info: ObjectInfo) -> bool:
        """Return whether a shard can be opened without a fetch. Raises ConfigError in a forked child."""
        return self._job.is_resident(info)

    def open_early(self, wanted: Sequence[ShardRequest]) -> Mapping[Digest, Shard]:  # noqa: ARG002 - see `ShardStore`
        """Return {}: `open_shard` of this store waits until the shard is complete."""
        return {}

    def advance(self, epoch: int, position: int) -> None:
        """Do nothing: this store declares a next use only in `release_shard`."""
