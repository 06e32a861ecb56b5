"""`Cache`, the class by which programs and the command line use a node's cache: fetch, stage, pin, scrub, configure.

`CacheJob` has the operations of one job: acquire, prefetch, release. `Cache` adds those that concern the whole cache.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from datasvc.cache.catalogue.configuration import (
    Pin,
    changing_pin,
    find_pin,
    may_become_cache,
    parse_budget,
    read_pins,
    remove_pin,
    write_pin,
)
from datasvc.cache.catalogue.quotas import DEFAULT_TENANT, Quota
from datasvc.cache.catalogue.records import footprint
from datasvc.cache.catalogue.tables import CatalogueTables
from datasvc.cache.job import CachedShards, CacheJob, Outcome
from datasvc.cache.peers.peers import Peers
from datasvc.cache.process_handle import CacheFolder
from datasvc.cache.status import CacheStatus, Finding, ScrubReport, check_object, read_status, scrub_folder
from datasvc.errors import CacheFullError, ConfigError
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest, ObjectInfo, Repository
from datasvc.repository.logs.references import check_name
from datasvc.shards.versions.dataset import Split
from datasvc.threads import run_in_threads

_MIN_THREADS = 8
_MAX_THREADS = 64
_BYTES_AT_ONCE = 512 << 20  # about the total size of the objects that are fetched at once


class Cache(CacheJob):
    """The cache of this node in `folder`; any number of processes may open it at the same time.

    Each process that has the cache open is a job of the cache. A `Cache` object is the handle of this job, see
    `CacheJob`; `new_job` starts further jobs, one per access order. An object that this process has acquired is not
    evicted until it is released, or until the process exits.

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
        if not str(folder):
            # Python takes an empty path for the working folder.
            raise ConfigError("the folder of the cache is empty; give its path, such as /nvme/cache")
        path = Path(os.path.realpath(os.path.expanduser(folder)))
        no_budget = ConfigError(
            f"the cache {path} has no budget yet; set one: Cache({str(folder)!r}, budget='50GB'), "
            "`datasvc stage --budget 50GB`, or --cache-budget of the training program"
        )
        # Budget and tenant are checked before the folder is created, so that an invalid one leaves nothing behind.
        budget_bytes = None if budget is None else parse_budget(str(budget), path)
        if budget_bytes is None and may_become_cache(path):
            raise no_budget
        super().__init__(path, check_name(tenant, "tenant"), peers)
        catalogue = self._open().catalogue
        if budget_bytes is not None:
            catalogue.configure(lambda current: replace(current, budget_bytes=budget_bytes))
        elif not catalogue.read(lambda tables: tables.configuration).budget_bytes:
            raise no_budget

    def available_bytes(self, digests: Collection[Digest]) -> int:
        """Return the bytes available for `digests`: `budget_bytes` minus the disk space of other pinned objects."""
        # By digest, so that an object of several pins counts once.
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
        """Return a `ShardStore` of `repository` that reads through this cache; it can be used after `Cache.close`."""
        self._open()  # raises ConfigError if this cache is closed
        # `CachedShards` gets its own handle, which stays open after this one is closed.
        return CachedShards(CacheJob(self.folder, self.tenant, self.peers), repository)

    def new_job(self, note: str = "") -> CacheJob:
        """Start a job for one access order. It has a clock of its own (see `next_use`), and ends with this process.

        Args:
            note: description of the job, shown in the status.
        """
        return CacheJob(self.folder, self.tenant, self.peers, self._open().new_job_id(note))

    def stage(
        self,
        splits: Sequence[Split],
        progress: Progress = NO_PROGRESS,
        *,
        num_threads: int | None = None,
        stop: threading.Event | None = None,
    ) -> StageReport:
        """Make all shards of `splits` resident, with the values beside them; equal objects are fetched once.

        Args:
            splits: splits of any data sets.
            progress: counts the bytes that are resident, by source.
            num_threads: shards to fetch at once; None: enough to use all parallel requests of this process.
            stop: event after which no fetch starts; None: all shards are fetched.

        Raises:
            CacheFullError: the shards exceed the budget, and nothing was fetched; or objects in use left too little
                space during the fetches.
            CorruptDataError, NotFoundError, UnavailableError: see `CacheJob.acquire`.
        """
        wanted = [(info, split.repository) for split in splits for info in split.table.cached_objects()]
        for repository in {split.repository for split in splits}:
            self.evict_retired(repository)  # after the tables were read, and the redactions with them
        return stage_objects(
            self,
            wanted,
            progress=progress,
            num_threads=num_threads,
            stop=stop or threading.Event(),
        )

    def pin(self, name: str, splits: Sequence[Split], progress: Progress = NO_PROGRESS) -> StageReport:
        """Stage all shards of `splits`, and exclude them from eviction until `unpin(name)`, also after restarts.

        An existing pin of this name is replaced; after an error it is unchanged. Concurrent calls for the same name
        run one after the other. Raises the errors of `stage`.
        """
        opened = self._open()
        with changing_pin(opened.files.pins, name):
            return self._pin(opened, name, splits, progress)

    def _pin(self, opened: CacheFolder, name: str, splits: Sequence[Split], progress: Progress) -> StageReport:
        """Pin as `pin` does; the caller excludes concurrent changes of this pin."""
        objects = {info.digest: info.size_bytes for split in splits for info in split.table.cached_objects()}
        folder = opened.files.pins
        old_pin = read_pins(folder).get(name)
        old_objects = {} if old_pin is None else dict(old_pin.objects)
        added = {digest: size for digest, size in objects.items() if digest not in old_objects}
        # First the file, with the old objects too: it must list every object that the catalogue pins, so that `unpin`
        # finds all of them after a crash.
        write_pin(folder, Pin(name, {**old_objects, **objects}))
        try:
            # Pinned before the fetch, so that no shard of the pin is evicted while the others are fetched.
            opened.catalogue.pin(name, added)
            staged = self.stage(splits, progress)
        except BaseException:
            opened.catalogue.unpin(name, added)
            if old_pin is None:
                remove_pin(folder, name)
            else:
                write_pin(folder, old_pin)
            raise
        removed = {digest: size for digest, size in old_objects.items() if digest not in objects}
        opened.catalogue.unpin(name, removed)
        write_pin(folder, Pin(name, objects))
        return staged

    def unpin(self, name: str) -> Pin:
        """Remove a pin: its objects may be evicted. Raises NotFoundError if nothing is pinned as `name`."""
        opened = self._open()
        with changing_pin(opened.files.pins, name):
            pin = find_pin(opened.files.pins, name)
            # First the catalogue: the file must list every object that the catalogue pins, as in `_pin`.
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
        """Read one object; return "intact", "corrupt" (it is now in quarantine) or "gone" (it was not resident)."""
        return check_object(self._open(), digest)

    def status(self) -> CacheStatus:
        """Return the disk space in use, and the jobs and tenants that use it."""
        opened = self._open()
        opened.count_hits()  # write the latest hits of this process, which are in memory only, to the catalogue
        return read_status(opened)

    def counters(self) -> Mapping[str, int]:
        """Return the counters of all processes since the catalogue was created, by name."""
        opened = self._open()
        opened.count_hits()
        return opened.catalogue.read(CatalogueTables.counters)


@contextmanager
def use_cache(cache: Cache | str | Path, *, peers: Peers | None = None) -> Iterator[Cache]:
    """Yield `cache`. If `cache` is a folder, open the cache in it, and close that cache after the block.

    Args:
        cache: an open cache, which stays open; or the folder of a cache that has a budget.
        peers: other nodes to read objects from; ignored if `cache` is open.

    Raises:
        ConfigError, CorruptDataError, UnavailableError: the cache cannot be opened, see `Cache`.
    """
    if isinstance(cache, Cache):
        yield cache
        return
    with Cache(cache, peers=peers) as opened:
        yield opened


@dataclass(frozen=True)
class StageReport:
    """Result of staging: objects and bytes that were resident already (hits), or came from the origin or other nodes.

    `num_left` is the number of objects that were not staged because staging was stopped.
    """

    num_hits: int
    num_from_origin: int
    num_from_peers: int
    num_left: int
    hit_bytes: int
    origin_bytes: int
    peer_bytes: int

    @property
    def num_fetched(self) -> int:
        """Number of objects from origin and other nodes."""
        return self.num_from_origin + self.num_from_peers

    @property
    def fetched_bytes(self) -> int:
        """Bytes from origin and other nodes."""
        return self.origin_bytes + self.peer_bytes


def stage_objects(
    job: CacheJob,
    requests: Iterable[tuple[ObjectInfo, Repository]],
    *,
    progress: Progress,
    num_threads: int | None,
    stop: threading.Event,
) -> StageReport:
    """Make objects resident; see `Cache.stage`. Each is held until all have arrived, so that no fetch evicts it."""
    objects = {info.digest: (info, repository) for info, repository in requests}
    if job.peers is not None:
        objects = {digest: objects[digest] for digest in job.peers.stage_order(objects)}
    needed_bytes = sum(footprint(info.size_bytes) for info, _ in objects.values())
    # Checked before the first fetch: a set above this limit can never fit, and would evict other data for nothing.
    # A smaller set may fail later, because pinned objects and objects in use are not subtracted here.
    available_bytes = job.budget_bytes
    if needed_bytes > available_bytes:
        raise CacheFullError(
            f"staging needs {needed_bytes} bytes, and {available_bytes} of the budget of {job.folder} "
            "are available; raise the budget with --budget, or do not stage: a loader with shuffle='windowed' "
            "streams through a smaller cache"
        )
    progress.begin(sum(info.size_bytes for info, _ in objects.values()))
    held: list[Digest] = []
    arrived: list[tuple[Outcome, int]] = []

    def stage_one(info: ObjectInfo, repository: Repository) -> None:
        if stop.is_set():
            return
        _, outcome = job.hold(info, repository, progress)
        held.append(info.digest)
        arrived.append((outcome, info.size_bytes))

    try:
        # After an error, `run_in_threads` waits for the fetches in progress, and starts no others.
        run_in_threads(stage_one, list(objects.values()), num_threads or _choose_threads(len(objects), needed_bytes))
    finally:
        for digest in held:
            job.release(digest)
    return _summary(arrived, len(objects))


def _choose_threads(num_objects: int, needed_bytes: int) -> int:
    """Return how many objects to fetch at once: more if they are small, because a small object has few requests."""
    mean_bytes = max(1, needed_bytes // max(1, num_objects))
    return min(max(_MIN_THREADS, _BYTES_AT_ONCE // mean_bytes), _MAX_THREADS)


def _summary(arrived: list[tuple[Outcome, int]], num_objects: int) -> StageReport:
    sizes: dict[Outcome, list[int]] = {"resident": [], "origin": [], "peer": []}
    for outcome, size_bytes in arrived:
        sizes[outcome].append(size_bytes)
    return StageReport(
        num_hits=len(sizes["resident"]),
        num_from_origin=len(sizes["origin"]),
        num_from_peers=len(sizes["peer"]),
        num_left=num_objects - len(arrived),
        hit_bytes=sum(sizes["resident"]),
        origin_bytes=sum(sizes["origin"]),
        peer_bytes=sum(sizes["peer"]),
    )
