"""A node's cache as its users see it."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from datasvc.cache.budget import parse_budget
from datasvc.cache.catalogue.pins import Pin, changing_pin, find_pin, read_pins, remove_pin, write_pin
from datasvc.cache.catalogue.quotas import DEFAULT_TENANT, Quota
from datasvc.cache.catalogue.records import footprint
from datasvc.cache.fetch.fetch import Fetcher, Outcome, Report
from datasvc.cache.peers.peers import Peers
from datasvc.cache.process_handle import CacheFolder, join_folder, leave_folder
from datasvc.cache.scrub import Finding, ScrubReport, check_object, scrub_folder
from datasvc.cache.sources.remote_file import Store
from datasvc.cache.staging import StageReport, stage_objects
from datasvc.cache.status import CacheStatus, read_status
from datasvc.errors import ConfigError
from datasvc.order import NextUse
from datasvc.repository import Digest, ObjectInfo, Repository
from datasvc.repository.logs.references import check_name
from datasvc.shards.format.reader import Shard
from datasvc.shards.versions.dataset import ShardRequest, Split


class Acquired(NamedTuple):
    """An object that this process holds.

    Attributes:
        path: its file; it stays until the object is released.
        outcome: "resident" where it was there already, else where it came from: "origin" or "peer".
    """

    path: Path
    outcome: Outcome


class Cache:
    """The cache of this node in `folder`; any number of processes may open it at once.

    What this process opens from it stays until released, or until the process ends however it ends.

    Args:
        folder: on a local disk, for the cache alone.
        budget: bytes, or such as "50GB" or "10%"; kept for the node. None: as set before.
        tenant: whose quota is used, see `set_quota`.
        peers: other nodes to ask before the origin; None: there are none.

    Raises:
        ConfigError: no budget was ever set, or it is out of range; the folder cannot be used.
        CorruptDataError: the catalogue is damaged and in use.
        UnavailableError: it cannot be opened.
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
        wanted = None if budget is None else parse_budget(str(budget), self.folder)
        opened = join_folder(self.folder)
        self._opened: CacheFolder | None = opened
        self._fetcher = opened.fetcher(self.tenant, peers)
        self._leave = weakref.finalize(self, leave_folder, self.folder, opened)
        if wanted is not None:
            opened.catalogue.configure(lambda before: replace(before, budget_bytes=wanted))
        elif not opened.catalogue.configuration.budget_bytes:
            raise ConfigError(f"the cache {self.folder} has no budget yet; give one, such as budget='50GB'")

    @property
    def budget_bytes(self) -> int:
        """What this cache's tenant may use at most: the node's budget, without what is guaranteed to others."""
        return self._open().catalogue.account().available(self.tenant)

    def room_bytes(self, digests: Collection[Digest]) -> int:
        """Return what the budget leaves for some objects beside what is pinned of others."""
        pinned = {
            digest: size
            for pin in read_pins(self._open().files.pins).values()
            for digest, size in pin.objects.items()
        }
        return self.budget_bytes - sum(footprint(size) for digest, size in pinned.items() if digest not in digests)

    def set_quota(self, tenant: str, quota: Quota) -> None:
        """Set what a tenant is guaranteed and may use at most, for all processes of the node.

        Raises ConfigError: more would be guaranteed than there is.
        """
        name = check_name(tenant, "tenant")
        self._open().catalogue.configure(lambda before: replace(before, quotas={**before.quotas, name: quota}))

    def shards(self, repository: Repository) -> CachedShards:
        """Return the shards of `repository`, read through this cache; usable for as long as they are kept."""
        self._open()
        return CachedShards(self.folder, repository, self._fetcher)

    def acquire(self, info: ObjectInfo, repository: Store, report: Report | None = None) -> Acquired:
        """Make an object resident and hold it until `release`.

        Args:
            info: the object.
            repository: its origin, or a remote file as one.
            report: called with where bytes come from and how many, as they arrive.

        Raises:
            CacheFullError, CorruptDataError, NotFoundError, UnavailableError: see `Fetcher.fetch`.
            ConfigError: this cache is closed, or was opened before a fork.
        """
        opened = self._open()
        outcome = opened.acquire(info, repository, self._fetcher, report)
        return Acquired(opened.files.object_path(info.digest), outcome)

    def new_owner(self, note: str = "") -> str:
        """Return a name for one order of this process: it has a clock of its own; see `CacheFolder.new_owner`."""
        return self._open().new_owner(note)

    def end_owner(self, owner: str) -> None:
        """Say that an order is done: what it leaves in the cache goes first."""
        self._open().end_owner(owner)

    def release(self, digest: Digest, reuse: NextUse | None = None, *, owner: str | None = None) -> None:
        """Give up one hold of this process; the object may be evicted when nobody holds it.

        Args:
            digest: the object.
            reuse: when this job needs it again, where it knows; no matter where another needs it sooner.
            owner: the order that says so, see `new_owner`; None: this process.
        """
        self._open().release(digest, reuse, owner=owner)

    def prefetch(
        self, info: ObjectInfo, repository: Store, reuse: NextUse, *, evict: bool = True, owner: str | None = None
    ) -> Outcome:
        """Make an object resident ahead of its use, without holding it, and without waiting for anybody.

        Args:
            info: the object.
            repository: its origin, or a remote file as one.
            reuse: when it is needed; nothing is evicted for it that is needed sooner.
            evict: whether anything is evicted that anybody may need again.
            owner: as for `release`.

        Returns:
            "later" where that would evict what is needed sooner: nothing was done. "busy" where somebody fetches it.

        Raises as `acquire`.
        """
        return self._open().prefetch(info, repository, self._fetcher, reuse, evict=evict, owner=owner)

    def expect(
        self, next_uses: Mapping[Digest, int], now: int, *, passed_only: bool = False, owner: str | None = None
    ) -> None:
        """Say when this job needs objects: those that are resident, and that no other needs as soon, become its own.

        Args:
            next_uses: what the job's clock will say at the next use, see `NextUse`.
            now: what it says.
            passed_only: leave those of its own alone whose next use is yet to come.
            owner: as for `release`.
        """
        self._open().expect(next_uses, now, passed_only=passed_only, owner=owner)

    @contextmanager
    def resident(self, digest: Digest) -> Iterator[Path | None]:
        """Yield the file of an object that is resident and verified, held inside the block; None where it is not."""
        with self._open().resident(digest) as path:
            yield path

    def stage(
        self,
        splits: Sequence[Split],
        report: Report | None = None,
        *,
        num_threads: int | None = None,
        stop: threading.Event | None = None,
    ) -> StageReport:
        """Bring all shards of `splits` onto the node; equal shards once.

        Args:
            splits: of any data sets.
            report: called from any thread with where bytes came from ("resident", "origin", "peer") and how many.
            num_threads: shards fetched at once; None: enough for all requests that this process may have under way.
            stop: once it is set no further shard is begun.

        Raises:
            CacheFullError: they do not fit into the budget, and nothing was fetched; or beside what jobs hold.
            CorruptDataError, NotFoundError, UnavailableError: see `Fetcher.fetch`.
        """
        return stage_objects(
            self._open(),
            self._fetcher,
            ((info, split.repository) for split in splits for info in split.table.shards()),
            tenant=self.tenant,
            report=report,
            num_threads=num_threads,
            stop=stop or threading.Event(),
        )

    def pin(self, name: str, splits: Sequence[Split], report: Report | None = None) -> StageReport:
        """Stage all shards of `splits` and keep them until `unpin(name)`, over restarts too; raises as `stage`.

        Whoever pins or unpins the same name meanwhile waits.
        """
        opened = self._open()
        with changing_pin(opened.files.pins, name):
            return self._pin(opened, name, splits, report)

    def _pin(self, opened: CacheFolder, name: str, splits: Sequence[Split], report: Report | None) -> StageReport:
        objects = {info.digest: info.size_bytes for split in splits for info in split.table.shards()}
        folder = opened.files.pins
        before = read_pins(folder).get(name)
        kept = {} if before is None else dict(before.objects)
        added = {digest: size for digest, size in objects.items() if digest not in kept}
        # At every instant the file names all that the catalogue keeps, so that `unpin` can undo it after a crash.
        write_pin(folder, Pin(name, {**kept, **objects}))
        try:
            # Kept before they come: nothing of it is evicted while the rest is fetched.
            opened.catalogue.pin(name, added)
            staged = self.stage(splits, report)
        except BaseException:
            opened.catalogue.unpin(name, added)
            if before is None:
                remove_pin(folder, name)
            else:
                write_pin(folder, before)
            raise
        opened.catalogue.unpin(name, {digest: size for digest, size in kept.items() if digest not in objects})
        write_pin(folder, Pin(name, objects))
        return staged

    def unpin(self, name: str) -> Pin:
        """Let what was pinned as `name` be evicted. Raises NotFoundError: nothing was."""
        opened = self._open()
        with changing_pin(opened.files.pins, name):
            pin = find_pin(opened.files.pins, name)
            # In this order: what the catalogue keeps is named by a file at every instant.
            opened.catalogue.unpin(name, pin.objects)
            remove_pin(opened.files.pins, name)
        return pin

    def scrub(self, report: Callable[[int], None] | None = None) -> ScrubReport:
        """Read every resident object and quarantine those whose bytes have changed.

        Args:
            report: called with the bytes of each object read.
        """
        return scrub_folder(self._open(), report)

    def check(self, digest: Digest) -> Finding:
        """Read one resident object again, and quarantine it if its bytes have changed."""
        return check_object(self._open(), digest)

    def status(self) -> CacheStatus:
        """Return how full the cache is, and who uses it."""
        opened = self._open()
        opened.count_hits()
        return read_status(opened)

    def counters(self) -> Mapping[str, int]:
        """Return what was counted, over all processes, since the catalogue was made, by name."""
        opened = self._open()
        opened.count_hits()
        return opened.catalogue.counters()

    def count(self, name: str, number: int) -> None:
        """Add to a counter."""
        self._open().catalogue.count({name: number})

    def close(self) -> None:
        """Let go of the folder; closing again does nothing. What is held stays so until released."""
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
    """The shards of one repository through a node's cache: a `ShardStore`. Made by `Cache.shards`.

    What was not released is released when this object is dropped.
    """

    def __init__(self, folder: Path, repository: Repository, fetcher: Fetcher) -> None:
        self._opened = join_folder(folder)
        self._repository = repository
        self._fetcher = fetcher
        self._held: Counter[Digest] = Counter()
        weakref.finalize(self, _abandon, folder, self._opened, self._held)

    def open_shard(self, info: ObjectInfo) -> Shard:
        """Return the shard, mapped from the cache; never evicted before `release_shard`.

        Raises:
            CacheFullError, CorruptDataError, NotFoundError, UnavailableError: see `Cache.acquire`.
        """
        return self.open(info)[0]

    def open(self, info: ObjectInfo) -> tuple[Shard, Outcome]:
        """Return the shard as `open_shard` does, and where it came from."""
        outcome = self._opened.acquire(info, self._repository, self._fetcher)
        self._held[info.digest] += 1
        try:
            return Shard.map(self._opened.files.object_name(info.digest)), outcome
        except BaseException:
            self.release_shard(info)
            raise

    def release_shard(self, info: ObjectInfo, reuse: NextUse | None = None, *, owner: str | None = None) -> None:
        """Let the shard be evicted when space is needed; views of it that still exist stay readable."""
        weighed = None if reuse is None else self._fetcher.weigh(info.digest, reuse)
        self._opened.release(info.digest, weighed, owner=owner)
        self._held[info.digest] -= 1

    def is_resident(self, info: ObjectInfo) -> bool:
        """Return whether a shard can be opened without waiting. Raises ConfigError in a forked child."""
        self._opened.check_process()
        return self._opened.catalogue.ready(info)

    def open_early(self, wanted: Sequence[ShardRequest]) -> Mapping[Digest, Shard]:  # noqa: ARG002 - see `ShardStore`
        """Return {}: this store does not know the order, so it waits for whole shards."""
        return {}

    def advance(self, epoch: int, position: int) -> None:
        """Nothing to do: what was released last makes room first."""


def _abandon(folder: Path, opened: CacheFolder, held: Counter[Digest]) -> None:
    """Release what a dropped `CachedShards` held, and leave the folder: from a finalizer, wherever its thread is."""
    if opened.process == os.getpid():
        opened.holds.abandon(held.elements())
    leave_folder(folder, opened)
