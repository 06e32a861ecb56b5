"""The public interface of a node's cache: `Cache`, and the shards of one repository read through it."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from datasvc.cache.catalogue.configuration import parse_budget
from datasvc.cache.catalogue.pins import Pin, changing_pin, find_pin, read_pins, remove_pin, write_pin
from datasvc.cache.catalogue.quotas import DEFAULT_TENANT, Quota
from datasvc.cache.catalogue.records import footprint
from datasvc.cache.fetch.fetch import Fetcher, Outcome
from datasvc.cache.peers.peers import Peers
from datasvc.cache.process_handle import CacheFolder, join_folder, leave_folder
from datasvc.cache.scrub import Finding, ScrubReport, check_object, scrub_folder
from datasvc.cache.sources.remote_file import Store
from datasvc.cache.staging import StageReport, stage_objects
from datasvc.cache.status import CacheStatus, read_status
from datasvc.errors import ConfigError
from datasvc.order import NextUse
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, ObjectInfo, Repository
from datasvc.repository.logs.references import check_name
from datasvc.shards.format.reader import Shard
from datasvc.shards.versions.dataset import ShardRequest, Split


class Acquired(NamedTuple):
    """An object on which this process has a hold.

    Attributes:
        path: file of the object; it exists until the object is released.
        outcome: "resident" if the object was there already, otherwise its source: "origin" or "peer".
    """

    path: Path
    outcome: Outcome


class Cache:
    """The cache of this node in `folder`; any number of processes may open it at the same time.

    An object that this process has acquired is not evicted until it is released, or until the process exits.

    Args:
        folder: folder on a local disk, used by the cache alone.
        budget: bytes, or text such as "50GB" or "10%"; stored for all processes of the node. None: the stored budget.
        tenant: tenant whose quota is charged, see `set_quota`.
        peers: other nodes to read objects from before the origin; None: no other nodes.

    Raises:
        ConfigError: no budget was ever set, the budget is out of range, or the folder cannot be used.
        CorruptDataError: the catalogue is damaged and other processes use it.
        UnavailableError: the catalogue cannot be opened.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        budget: int | str | None = None,
        tenant: str = DEFAULT_TENANT,
        peers: Peers | None = None,
    ) -> None:
        self.folder = Path(folder).expanduser().resolve()
        self.tenant = check_name(tenant, "tenant")
        self.peers = peers
        budget_bytes = None if budget is None else parse_budget(str(budget), self.folder)
        opened = join_folder(self.folder)
        self._opened: CacheFolder | None = opened
        self._fetcher = opened.fetcher(self.tenant, peers)
        # Also runs if this object is collected without `close`.
        self._leave = weakref.finalize(self, leave_folder, self.folder, opened)
        if budget_bytes is not None:
            opened.catalogue.configure(lambda current: replace(current, budget_bytes=budget_bytes))
        elif not opened.catalogue.configuration.budget_bytes:
            raise ConfigError(f"the cache {self.folder} has no budget yet; set one, such as budget='50GB'")

    @property
    def budget_bytes(self) -> int:
        """Most bytes that this tenant may use: the budget of the node minus the guarantees of other tenants."""
        return self._open().catalogue.account().available(self.tenant)

    def available_bytes(self, digests: Collection[Digest]) -> int:
        """Return the bytes available for `digests`: the budget minus other pinned objects."""
        pinned = {
            digest: size
            for pin in read_pins(self._open().files.pins).values()
            for digest, size in pin.objects.items()
        }
        return self.budget_bytes - sum(footprint(size) for digest, size in pinned.items() if digest not in digests)

    def set_quota(self, tenant: str, quota: Quota) -> None:
        """Set the guaranteed and the maximum bytes of a tenant, for all processes of the node.

        Raises ConfigError if the guarantees of all tenants together would exceed the budget.
        """
        name = check_name(tenant, "tenant")
        self._open().catalogue.configure(lambda current: replace(current, quotas={**current.quotas, name: quota}))

    def shards(self, repository: Repository) -> CachedShards:
        """Return a store of the shards of `repository` that reads through this cache, and outlives `close`."""
        self._open()
        return CachedShards(self.folder, repository, self._fetcher)

    def acquire(self, info: ObjectInfo, repository: Store, progress: Progress = NO_PROGRESS) -> Acquired:
        """Make an object resident, and add a hold on it until `release`.

        Args:
            info: the object.
            repository: origin of the object: a repository, or a remote file.
            progress: counts the bytes that arrive, by source.

        Raises:
            CacheFullError, CorruptDataError, NotFoundError, UnavailableError: see `Fetcher.fetch`.
            ConfigError: this cache is closed, or was opened before a fork.
        """
        opened = self._open()
        outcome = opened.acquire(info, repository, self._fetcher, progress)
        return Acquired(opened.files.object_path(info.digest), outcome)

    def new_job(self, note: str = "") -> str:
        """Register one access order of this process, and return its job id; see `CacheFolder.new_job`."""
        return self._open().new_job(note)

    def end_job(self, job_id: str) -> None:
        """Mark a job of `new_job` as ended: its objects are evicted first."""
        self._open().end_job(job_id)

    def release(self, digest: Digest, reuse: NextUse | None = None, *, job_id: str | None = None) -> None:
        """Remove one hold of this process; an object without holds may be evicted.

        Args:
            digest: the object.
            reuse: next use by this job; None: unknown. Ignored if another job needs the object sooner.
            job_id: job of `new_job` that declares the next use; None: this process.
        """
        self._open().release(digest, reuse, job_id=job_id)

    def prefetch(
        self, info: ObjectInfo, repository: Store, reuse: NextUse, *, evict: bool = True, job_id: str | None = None
    ) -> Outcome:
        """Make an object resident before its use, without a hold, and without waiting for other fetches.

        Args:
            info: the object.
            repository: origin of the object: a repository, or a remote file.
            reuse: next use of the object; nothing is evicted for it that is needed sooner.
            evict: whether objects that a job may need again can be evicted.
            job_id: as for `release`.

        Returns:
            As `acquire`; or "later": the fetch would evict objects needed sooner, and nothing was done; or "busy":
            another thread or process fetches the object.

        Raises:
            CacheFullError, CorruptDataError, NotFoundError, UnavailableError, ConfigError: as `acquire`.
        """
        return self._open().prefetch(info, repository, self._fetcher, reuse, evict=evict, job_id=job_id)

    def expect(
        self, next_uses: Mapping[Digest, int], now: int, *, passed_only: bool = False, job_id: str | None = None
    ) -> None:
        """Declare the next uses of objects by this job; those that are resident are assigned to it.

        An object that another running job needs as soon stays assigned to that job.

        Args:
            next_uses: next use of each object, on the job's clock, see `NextUse`. Bytes.
            now: current value of the job's clock. Bytes.
            passed_only: leave the job's own objects unchanged if their next use is still ahead.
            job_id: as for `release`.
        """
        self._open().expect(next_uses, now, passed_only=passed_only, job_id=job_id)

    @contextmanager
    def resident(self, digest: Digest) -> Iterator[Path | None]:
        """Yield the file of a resident, verified object, with a hold inside the block; None if it is not resident."""
        with self._open().resident(digest) as path:
            yield path

    def stage(
        self,
        splits: Sequence[Split],
        progress: Progress = NO_PROGRESS,
        *,
        num_threads: int | None = None,
        stop: threading.Event | None = None,
    ) -> StageReport:
        """Make all shards of `splits` resident; equal shards are fetched once.

        Args:
            splits: splits of any data sets.
            progress: counts the bytes that are there, by source.
            num_threads: shards to fetch at once; None: enough to keep all requests of this process busy.
            stop: no further shard is started after this event is set.

        Raises:
            CacheFullError: the shards exceed the budget, and nothing was fetched; or the space that objects in use
                leave was not enough.
            CorruptDataError, NotFoundError, UnavailableError: see `Fetcher.fetch`.
        """
        return stage_objects(
            self._open(),
            self._fetcher,
            ((info, split.repository) for split in splits for info in split.table.shards()),
            tenant=self.tenant,
            progress=progress,
            num_threads=num_threads,
            stop=stop or threading.Event(),
        )

    def pin(self, name: str, splits: Sequence[Split], progress: Progress = NO_PROGRESS) -> StageReport:
        """Stage all shards of `splits`, and exclude them from eviction until `unpin(name)`, also after restarts.

        Concurrent calls for the same name run one after the other. Raises the errors of `stage`.
        """
        opened = self._open()
        with changing_pin(opened.files.pins, name):
            return self._pin(opened, name, splits, progress)

    def _pin(self, opened: CacheFolder, name: str, splits: Sequence[Split], progress: Progress) -> StageReport:
        objects = {info.digest: info.size_bytes for split in splits for info in split.table.shards()}
        folder = opened.files.pins
        old_pin = read_pins(folder).get(name)
        old_objects = {} if old_pin is None else dict(old_pin.objects)
        added = {digest: size for digest, size in objects.items() if digest not in old_objects}
        # Written first: the file lists every object that the catalogue pins, so `unpin` works after a crash.
        write_pin(folder, Pin(name, {**old_objects, **objects}))
        try:
            # Pinned before the fetch: no shard of the pin is evicted while the others are fetched.
            opened.catalogue.pin(name, added)
            staged = self.stage(splits, progress)
        except BaseException:
            opened.catalogue.unpin(name, added)
            if old_pin is None:
                remove_pin(folder, name)
            else:
                write_pin(folder, old_pin)
            raise
        opened.catalogue.unpin(name, {digest: size for digest, size in old_objects.items() if digest not in objects})
        write_pin(folder, Pin(name, objects))
        return staged

    def unpin(self, name: str) -> Pin:
        """Remove a pin: its objects may be evicted. Raises NotFoundError if nothing is pinned as `name`."""
        opened = self._open()
        with changing_pin(opened.files.pins, name):
            pin = find_pin(opened.files.pins, name)
            # The catalogue first: an object that it pins is listed in a file at every instant.
            opened.catalogue.unpin(name, pin.objects)
            remove_pin(opened.files.pins, name)
        return pin

    def scrub(self, progress: Progress = NO_PROGRESS) -> ScrubReport:
        """Read every resident object, and quarantine those whose bytes have changed.

        Args:
            progress: counts the bytes of each object that was read.
        """
        return scrub_folder(self._open(), progress)

    def check(self, digest: Digest) -> Finding:
        """Read one resident object, and quarantine it if its bytes have changed."""
        return check_object(self._open(), digest)

    def status(self) -> CacheStatus:
        """Return the disk space in use, and the jobs and tenants that use it."""
        opened = self._open()
        opened.count_hits()
        return read_status(opened)

    def counters(self) -> Mapping[str, int]:
        """Return the counters of all processes since the catalogue was created, by name."""
        opened = self._open()
        opened.count_hits()
        return opened.catalogue.counters()

    def count(self, name: str, number: int) -> None:
        """Add to a counter."""
        self._open().catalogue.count({name: number})

    def close(self) -> None:
        """Close the cache. Holds stay until they are released; closing again does nothing."""
        self._opened = None
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> CacheFolder:
        if self._opened is None:
            raise ConfigError(f"the cache {self.folder} was closed; open it again")
        self._opened.check_process()
        return self._opened


class CachedShards:
    """A `ShardStore` of one repository that reads through a node's cache. Created by `Cache.shards`.

    Shards that were not released are released when this object is garbage-collected.
    """

    def __init__(self, folder: Path, repository: Repository, fetcher: Fetcher) -> None:
        self._opened = join_folder(folder)
        self._repository = repository
        self._fetcher = fetcher
        self._held: Counter[Digest] = Counter()
        weakref.finalize(self, _abandon, folder, self._opened, self._held)

    def open_shard(self, info: ObjectInfo) -> Shard:
        """Return the shard, mapped from the cache; it is not evicted before `release_shard`.

        Raises:
            CacheFullError, CorruptDataError, NotFoundError, UnavailableError: see `Cache.acquire`.
        """
        return self.open(info)[0]

    def open(self, info: ObjectInfo) -> tuple[Shard, Outcome]:
        """Return the shard as `open_shard` does, and its source."""
        outcome = self._opened.acquire(info, self._repository, self._fetcher)
        self._held[info.digest] += 1
        try:
            return Shard.map(self._opened.files.object_name(info.digest)), outcome
        except BaseException:
            self.release_shard(info)
            raise

    def release_shard(self, info: ObjectInfo, reuse: NextUse | None = None, *, job_id: str | None = None) -> None:
        """Allow the shard to be evicted when space is needed; existing views of it stay readable."""
        biased = None if reuse is None else self._fetcher.bias_to_owned(info.digest, reuse)
        self._opened.release(info.digest, biased, job_id=job_id)
        self._held[info.digest] -= 1

    def is_resident(self, info: ObjectInfo) -> bool:
        """Return whether a shard can be opened without a fetch. Raises ConfigError in a forked child."""
        self._opened.check_process()
        return self._opened.catalogue.is_ready(info)

    def open_early(self, wanted: Sequence[ShardRequest]) -> Mapping[Digest, Shard]:  # noqa: ARG002 - see `ShardStore`
        """Return {}: without an access order, this store waits for complete shards."""
        return {}

    def advance(self, epoch: int, position: int) -> None:
        """Do nothing: this store declares no next uses."""


def _abandon(folder: Path, opened: CacheFolder, held: Counter[Digest]) -> None:
    """Release the shards of a collected `CachedShards`, and close its use of the folder. Runs in a finalizer."""
    if opened.process == os.getpid():
        opened.locks.abandon(held.elements())
    leave_folder(folder, opened)
