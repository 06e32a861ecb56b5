"""Makes space for new objects: evicts, quarantines and cleans up inside one write transaction of the catalogue.

`eviction` chooses the victims, the objects to evict. This module takes the exclusive lock of each victim, so that no
object in use is evicted, and removes its file and its record together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from datasvc.cache.catalogue.eviction import EvictionCandidate, by_distance, choose_victims, distance_bytes
from datasvc.cache.catalogue.files import FileLink, Files
from datasvc.cache.catalogue.object_locks import ObjectLocks, is_held, lease_of
from datasvc.cache.catalogue.quotas import Account
from datasvc.cache.catalogue.records import RESIDENT, UNVERIFIED, ObjectRecord, footprint
from datasvc.cache.catalogue.tables import CatalogueTables, JobRow
from datasvc.errors import CacheFullError, CorruptDataError
from datasvc.order import NEVER, NextUse
from datasvc.repository import Digest, ObjectInfo

NO_JOB: Final = ""
"""Job id of objects that a scan of the folder found."""
SPARE_NOTHING: Final = -NEVER
"""A `min_distance_bytes` that allows the eviction of every object."""
SPARE_NEEDED: Final = NEVER // 2
"""A `min_distance_bytes` that keeps every object that a running job may need again, at a known time or not."""

_NO_TENANT: Final = ""  # a tenant without objects: an eviction for it leaves every tenant its guarantee
_MAPPED: Final = ".mapped"  # name suffix of a quarantined file on which a job had a hold when it was moved


class SpaceAllocator:
    """Manages the disk space of a cache inside one write transaction; `Catalogue` creates one per transaction.

    Args:
        tables: the tables, in this transaction.
        files: files of the cache.
        locks: locks of this process on the objects of the cache.
    """

    def __init__(self, tables: CatalogueTables, files: Files, locks: ObjectLocks) -> None:
        self._tables = tables
        self._files = files
        self._locks = locks
        self._locked: list[Digest] = []  # locked exclusively in this transaction
        self._is_running: dict[str, bool] = {}  # by lease: whether its process runs

    def make_space(self, tenant: str, size_bytes: int, min_distance_bytes: int = SPARE_NOTHING) -> bool:
        """Free space until a tenant may use `size_bytes` more; return False if that is impossible.

        If space is missing, call `sweep` first, which may free enough. Evict objects only if the result is True.

        Args:
            tenant: tenant that needs the space.
            size_bytes: disk space to free.
            min_distance_bytes: only objects whose next use is further away than this are evicted.
        """
        if self._tables.account().missing(tenant, size_bytes) <= 0:
            return True
        self.sweep()
        account = self._tables.account()
        victims = self._choose_victims(account, tenant, size_bytes, min_distance_bytes)
        # `account` is without the victims now. If space is still missing, their eviction would only lose objects.
        if account.missing(tenant, size_bytes) > 0:
            return False
        self._evict(victims)
        return True

    def enforce_quotas(self) -> None:
        """Evict unused objects where the budget, or the limit of a tenant, is exceeded."""
        self.sweep()
        for tenant in self._tables.account().used_bytes:
            # 0 more bytes: evict only what is used above the tenant's maximum, or above the budget.
            self._evict(self._choose_victims(self._tables.account(), tenant, 0))

    def enforce_budget(self) -> None:
        """Evict unused objects above the budget, those within guarantees last. Unused guarantees are not reserved."""
        # Ignore maximums until the next reservation, because a scan may not find the tenants of objects.
        guarantees = {
            name: replace(quota, maximum_bytes=None) for name, quota in self._tables.account().quotas.items()
        }
        # An eviction for `_NO_TENANT` takes objects above the guarantees. Then, an eviction for a tenant also takes
        # the tenant's own objects within its guarantee.
        for tenant in (_NO_TENANT, *self._tables.account().used_bytes):
            account = replace(self._tables.account(), quotas=guarantees, is_limited_by_disk=True)
            self._evict(self._choose_victims(account, tenant, 0))

    def is_alive(self, job: JobRow) -> bool:
        """Return whether a job has not ended and its process runs."""
        if job.clock_bytes is None or job.job_id == NO_JOB:
            return False
        lease_id = lease_of(job.job_id)
        # Checked once per transaction: each check opens the file of the lease.
        if lease_id not in self._is_running:
            self._is_running[lease_id] = is_held(self._files.leases, lease_id)
        return self._is_running[lease_id]

    def find_incoming(self, tenant: str, size_bytes: int) -> Digest | None:
        """Return an object in transfer whose later eviction makes space for `tenant`; None if there is none."""
        account = self._tables.account()
        if size_bytes > account.available(tenant):
            return None  # no eviction can make this fit
        for digest in self._tables.reserved():
            record = self._tables.get(digest)
            assert record is not None
            helps = account.helps(record.tenant, tenant, record.used_bytes, size_bytes)
            # A free lock means that the fetch has ended without a result, so waiting for it would not help.
            if helps and self._files.is_incoming_locked(digest):
                return digest
        return None

    def refusal(self, tenant: str, info: ObjectInfo) -> CacheFullError:
        """Return the error for the object `info`, which does not fit for `tenant`."""
        account, budget = self._tables.account(), self._tables.configuration.budget_bytes
        disk_limit = (
            f", lowered to {account.budget_bytes} because the disk was full (set the budget again once it is not)"
            if account.is_limited_by_disk
            else ""
        )
        tenant_limit = (
            f"; tenant {tenant!r} may use {account.available(tenant)} of these bytes" if account.quotas else ""
        )
        above_budget = account.above_budget(tenant, footprint(info.size_bytes))
        above_maximum = account.above_maximum(tenant, footprint(info.size_bytes))
        # Each limit that is exceeded must be raised: a higher budget does not help a tenant at its maximum.
        increases = [f"raise the budget by at most {above_budget} bytes"] if above_budget > 0 else []
        if above_maximum > 0:
            increases.append(f"raise the maximum of tenant {tenant!r} by at most {above_maximum} bytes")
        return CacheFullError(
            f"not enough space for {info.size_bytes} bytes: the budget is {budget} bytes{disk_limit}{tenant_limit}; "
            f"{account.total_bytes} are taken, and evicting every object that may be evicted for this tenant would "
            "not free enough: the others are in use by running jobs, being fetched, pinned, or kept for other "
            f"tenants; {' and '.join(increases)}, unpin objects, or wait until a job has ended"
        )

    def sweep(self) -> None:
        """Remove quarantined files, and the reservations and jobs of ended processes. Call it before any eviction."""
        self._tables.quarantined_bytes = self._empty_quarantine()
        for digest in self._tables.reserved():
            record = self._tables.get(digest)
            assert record is not None
            if not self._files.is_incoming_locked(digest):
                self.forget(digest, record)
                self._files.remove_incoming(digest)
        for job in self._tables.jobs():
            if not self.is_alive(job):
                self._tables.unregister(job.job_id)

    def claim(self, digest: Digest, new_record: ObjectRecord) -> None:
        """Replace an object's record, unless another running job needs the object at the same distance or sooner.

        A record of the same job, or of the process of this job, is always replaced.
        """
        record, claimant = self._tables.get(digest), self._tables.job(new_record.job_id)
        assert record is not None
        is_own = record.job_id in {new_record.job_id, lease_of(new_record.job_id)}
        other = None if is_own else self._tables.job(record.job_id)
        if other is not None:
            new_bytes = distance_bytes(new_record.next_use, None if claimant is None else claimant.clock_bytes)
            old_bytes = distance_bytes(record.next_use, other.clock_bytes)
            # These distances are compared first, because `is_alive` may open a file.
            if old_bytes <= new_bytes and self.is_alive(other):
                return
        self._tables.put(digest, record, new_record)

    def remove_wrong_size(self, info: ObjectInfo, record: ObjectRecord) -> None:
        """Remove an object that is not verified, and whose recorded size differs from the size in `info`.

        Raises:
            CorruptDataError: the object is verified, so the size in `info` is wrong.
        """
        if record.state == RESIDENT:
            # The object stays: its digest was verified, and jobs may have mapped its file.
            raise CorruptDataError(
                f"object {info.digest[:12]}... has {record.size_bytes} bytes, but {info.size_bytes} were requested: "
                "the shard table or index that names this size is wrong; verify the repository"
            )
        # A reserved object has no complete file that could be corrupt.
        if record.state == UNVERIFIED:
            self._tables.count({"corrupt": 1})
        self.forget(info.digest, record)
        self._files.remove_incoming(info.digest)

    def forget(self, digest: Digest, record: ObjectRecord) -> None:
        """Remove the file, the link and the record of an object."""
        self._files.object_path(digest).unlink(missing_ok=True)
        FileLink(self._files.folder, digest).remove()
        self._tables.delete(digest, record)

    def try_lock_exclusive(self, digest: Digest) -> bool:
        """Lock an object until `unlock_all`, so that no process can use it; return False if a process uses it now."""
        # Without waiting: an object may be in use until a job ends.
        if not self._locks.try_lock_exclusive(digest):
            return False
        self._locked.append(digest)
        return True

    def unlock_all(self) -> None:
        """Release the exclusive locks. Call it after the transaction is committed."""
        for digest in self._locked:
            self._locks.unlock(digest)

    def quarantine(self, digest: Digest, *, held: bool) -> None:
        """Move a corrupt file to the quarantine, where it stays until its space is needed and no job holds it.

        Args:
            digest: the object.
            held: whether a job has a hold on the object.
        """
        path = self._files.object_path(digest)
        quarantined = self._files.quarantine / f"{digest}{_MAPPED if held else ''}"
        file_bytes = _footprint_of(path)
        if file_bytes:
            # An earlier file of this object in the quarantine is replaced.
            self._tables.quarantined_bytes += file_bytes - _footprint_of(quarantined)
            path.replace(quarantined)

    def is_quarantined(self, digest: Digest) -> bool:
        """Return whether the quarantine has a file of an object, such as one on which a job still has a hold."""
        return any((self._files.quarantine / f"{digest}{suffix}").exists() for suffix in ("", _MAPPED))

    def quarantine_or_remove(self, digest: Digest, tenant: str) -> None:
        """Quarantine a corrupt file, or remove it if `tenant` has no space for both this file and a correct one."""
        path = self._files.object_path(digest)
        if self._tables.account().missing(tenant, _footprint_of(path)) > 0:
            path.unlink(missing_ok=True)
        else:
            self.quarantine(digest, held=False)

    def count_quarantine(self, tenant: str) -> None:
        """Measure the quarantine again, and empty it if `tenant` is above its maximum or the budget is exceeded.

        A process that is killed after it moved a file to the quarantine, but before its commit, has not counted it.
        """
        self._tables.quarantined_bytes = sum(map(_footprint_of, self._files.quarantine.iterdir()))
        if self._tables.account().missing(tenant, 0) > 0:
            self._tables.quarantined_bytes = self._empty_quarantine()

    def _choose_victims(
        self, account: Account, tenant: str, size_bytes: int, min_distance_bytes: int = SPARE_NOTHING
    ) -> Mapping[Digest, int]:
        """Return the bytes of each object to evict; lock these objects, and subtract their bytes from `account`."""
        victims = choose_victims(
            self._candidates(),
            account,
            tenant,
            size_bytes,
            min_distance_bytes=min_distance_bytes,
            take=lambda candidate: self.try_lock_exclusive(candidate.digest),
        )
        return {victim.digest: victim.freed_bytes for victim in victims}

    def _candidates(self) -> Iterator[EvictionCandidate]:
        """Yield the objects that may be evicted if they are not in use, in the order of eviction."""
        running = []
        for job in self._tables.jobs():
            # `jobs` returns the oldest job first, so the objects of the oldest ended job are evicted first.
            if self.is_alive(job):
                running.append(self._queue(job.job_id, job.clock_bytes))
            else:
                yield from self._queue(job.job_id, None)
        yield from by_distance(running)

    def _queue(self, job_id: str, clock_bytes: int | None) -> Iterator[EvictionCandidate]:
        for next_use, digest, freed_bytes, tenant in self._tables.furthest(job_id):
            yield EvictionCandidate(digest, freed_bytes, tenant, distance_bytes(next_use, clock_bytes))

    def _evict(self, victims: Mapping[Digest, int]) -> None:
        for digest in victims:
            record = self._tables.get(digest)
            assert record is not None
            self.forget(digest, record)
        self._tables.count({"evicted": len(victims), "evicted_bytes": sum(victims.values())})

    def _empty_quarantine(self) -> int:
        """Remove the quarantined files; return the bytes of those on which jobs still have holds."""
        mapped_bytes = 0
        for path in self._files.quarantine.iterdir():
            digest = Digest(path.name.removesuffix(_MAPPED))
            # The disk frees the space of a mapped file only after its last user has closed it.
            if path.name.endswith(_MAPPED) and self._locks.is_held(digest):
                mapped_bytes += _footprint_of(path)
            else:
                path.unlink(missing_ok=True)
        return mapped_bytes


def _footprint_of(path: Path) -> int:
    """Return the disk space of a file; 0 if it does not exist."""
    try:
        return footprint(path.lstat().st_size)
    except FileNotFoundError:
        return 0


def evict_for_inode(
    tables: CatalogueTables, space: SpaceAllocator, tenant: str, min_distance_bytes: int = SPARE_NOTHING
) -> bool:
    """Free an inode: remove files of ended processes, or else evict an object. Return False if there is neither."""
    old_limit = tables.limit_bytes
    # The bytes in use exceed this limit by one, so `make_space` must remove a file. The old limit is restored
    # afterwards: the disk lacks only inodes, not space.
    tables.limit_bytes = tables.account().total_bytes - 1
    try:
        return space.make_space(tenant, 0, min_distance_bytes)
    finally:
        tables.limit_bytes = old_limit


def min_distance_of(prefetch: NextUse | None, *, evict: bool) -> int:
    """Return the distance of next uses up to which a fetch evicts nothing; see `Catalogue.reserve`."""
    # An object that is needed now may take the place of any unused one. A prefetch keeps those needed before its own.
    distance_bytes = SPARE_NOTHING if prefetch is None else prefetch.next_use - prefetch.now
    return distance_bytes if evict else max(distance_bytes, SPARE_NEEDED)
