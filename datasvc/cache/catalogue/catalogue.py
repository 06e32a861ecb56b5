"""The catalogue of a node's cache: an LMDB database of resident and reserved objects, with one writer at a time.

`CacheJob`, through which programs use a cache, reads and changes the catalogue. The catalogue guards the budget:
space is reserved here before a byte is fetched. A reservation is refused if reserved and resident bytes together
would exceed the budget. The transaction that marks an object resident also gives its file the final name. The
transaction that deletes the record also removes the file.

A fetch writes to an incoming file and keeps this file locked. Its reservation is valid only while the lock is held.
The lock is taken before the reservation becomes visible, and released after the reservation is completed or dropped.
So a reservation whose lock is free belongs to a process that has ended.

A process that uses an object has a *hold* on it: a shared lock outside the catalogue (`object_locks`). An eviction
takes the exclusive lock of its victim (the object to evict), and keeps it until the transaction is committed.

LMDB runs without its own locks, which do not work across containers: a read transaction needs the shared lock of
`transaction_lock`, a write transaction the exclusive one.

LMDB runs without fsync. A crash of a process loses nothing; after a crash of the machine the catalogue is rebuilt
from the files, and each file is verified before it is used (`recovery`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Final, Literal, NamedTuple, TypeVar

import lmdb

from datasvc.cache.catalogue.configuration import Configuration
from datasvc.cache.catalogue.files import DISK_FULL, Files, ScannedFile
from datasvc.cache.catalogue.object_locks import (
    PRIVATE_FILE,
    ObjectLocks,
    RunningJob,
    TransactionLock,
    is_held,
    lease_of,
)
from datasvc.cache.catalogue.quotas import DEFAULT_TENANT
from datasvc.cache.catalogue.records import RESERVED, RESIDENT, UNVERIFIED, ObjectRecord, footprint
from datasvc.cache.catalogue.space import NO_JOB, SPARE_NOTHING, SpaceAllocator, evict_for_inode, min_distance_of
from datasvc.cache.catalogue.tables import CatalogueTables, Tables, describe_failure, parse_objects
from datasvc.errors import CacheFullError, UnavailableError
from datasvc.order import NextUse
from datasvc.repository import Digest, ObjectInfo


class NoSpaceYet(NamedTuple):
    """A refused reservation that may succeed once the object `digest` has arrived, which is being fetched."""

    digest: Digest


T = TypeVar("T")

Reservation = Literal["resident", "reserved", "busy", "later"] | NoSpaceYet
"""Result of `Catalogue.reserve`."""
InvalidateOutcome = Literal["unused", "held", "superseded"]
"""Result of `Catalogue.invalidate`."""

_MAP_BYTES: Final = 4 << 30  # address space, not memory: enough for some ten million objects
# `shrink` sets the limit at least this many bytes below the bytes in use. The disk may lack only a few bytes, but
# each call must free some space or raise: otherwise a fetch would call `shrink` forever.
_MIN_SHRINK_BYTES: Final = 64 << 10


class Catalogue:
    """The catalogue of one cache folder. Open it once per process, with `recovery.open_catalogue`.

    Raises:
        lmdb.Error: the database cannot be opened, or is damaged.
        UnavailableError: the database cannot be locked, or an earlier version has it open.
    """

    def __init__(self, files: Files, locks: ObjectLocks) -> None:
        self._files = files
        self._locks = locks
        with ExitStack() as opened:
            self._lock = TransactionLock(files.catalogue / "lock.mdb")
            opened.callback(self._lock.close)
            # Opening reads the database, and writes its first pages and its tables if they are missing.
            with self._lock.exclusive():
                # Without fsync: `recovery` rebuilds the catalogue after a crash of the machine.
                self.env = lmdb.open(
                    str(files.catalogue),
                    max_dbs=8,  # not less than the number of tables in `Tables`
                    map_size=_MAP_BYTES,
                    sync=False,
                    metasync=False,
                    lock=False,
                    mode=PRIVATE_FILE,
                )
                self._tables = Tables(self.env)
            opened.pop_all()

    def close(self) -> None:
        """Close the database."""
        self._lock.close()
        self.env.close()

    def close_after_fork(self) -> None:
        """Close the inherited lock file in a forked child."""
        self._lock.close_after_fork()

    def check(self) -> str:
        """Read the first and last row of every table; return the id of the boot in which the catalogue was built.

        Raises lmdb.Error or ValueError if a row is damaged: `recovery` then rebuilds the catalogue.
        """
        with self._lock.shared(), self.env.begin() as txn:
            tables = CatalogueTables(self._tables, txn)
            tables.check()
            return tables.boot

    def read(self, get: Callable[[CatalogueTables], T]) -> T:
        """Call `get` with the tables of one read transaction; return its result, which must not be an open cursor."""
        with self._map_errors(), self._lock.shared(), self.env.begin() as txn:
            return get(CatalogueTables(self._tables, txn))

    def objects(self) -> dict[Digest, ObjectRecord]:
        """Return every record."""
        # Parsed after the transaction, which excludes writers: parsing takes ten times as long as reading.
        return parse_objects(self.read(CatalogueTables.object_rows))

    def configure(self, change: Callable[[Configuration], Configuration]) -> None:
        """Change budget and quotas for all processes of the node, and evict unused objects above the new limits.

        An unchanged configuration evicts nothing. In both cases, a limit that `shrink` lowered is the budget again.

        Args:
            change: returns the new configuration, given the current one.

        Raises:
            ConfigError: raised by `change`.
            UnavailableError: the configuration cannot be written.
        """
        with self._writing() as (tables, space):
            configuration = change(tables.configuration)
            is_changed = configuration != tables.configuration
            self._store_configuration(tables, configuration, is_changed=is_changed)
            # If no budget was ever set, there is no limit to enforce, and the resident objects stay.
            if is_changed and configuration.budget_bytes:
                space.enforce_quotas()

    def rebuild(self, configuration: Configuration, scanned: Iterable[ScannedFile], boot: str) -> None:
        """Fill a new catalogue from the files of the folder; evict only what is above the budget."""
        with self._writing() as (tables, space):
            tables.boot = boot
            tables.register(NO_JOB, "")  # the job of all objects that the scan found: their next uses are unknown
            for file in scanned:
                record = ObjectRecord(UNVERIFIED, file.size_bytes, tables.next_use(NO_JOB, None), NO_JOB, file.tenant)
                tables.put(file.digest, None, record)
            # The caller has read this configuration from the folder, so it is not a change.
            self._store_configuration(tables, configuration, is_changed=False)
            if configuration.budget_bytes:
                space.enforce_budget()

    def register(self, job_id: str, note: str) -> None:
        """Register a process or an access order; call it before the job reserves anything."""
        with self._writing() as (tables, _):
            tables.register(job_id, note)

    def retire(self, job_id: str) -> None:
        """Mark the job of an access order as ended for good. From now on, its objects are evicted before others."""
        with self._writing() as (tables, _):
            # After an earlier call, `SpaceAllocator.sweep` may have unregistered the job.
            if tables.job(job_id) is not None:
                tables.retire(job_id)

    def is_ready(self, info: ObjectInfo) -> bool:
        """Return whether an object is resident and verified; without a hold of the caller, this can change any time.

        A cache hit costs this read transaction and the look-up of the file; it writes nothing to the catalogue.
        """
        state = self.read(lambda tables: tables.state(info.digest))
        return state == RESIDENT and self._files.is_there(info.digest, info.size_bytes)

    def reserve(
        self, info: ObjectInfo, job_id: str, tenant: str, *, prefetch: NextUse | None = None, evict: bool = True
    ) -> Reservation:
        """Reserve the space to fetch an object, unless it is resident.

        Args:
            info: the object; the caller has a hold on it, except for a prefetch.
            job_id: job of the caller.
            tenant: tenant whose quota is charged.
            prefetch: next use of an object to prefetch; None: the object is needed now.
            evict: whether objects may be evicted that a running job may need again; False only for a prefetch.

        Returns:
            "resident": the file exists and was verified. "reserved": the caller has locked the incoming file, and
            must fill it and call `complete` or `drop`. "busy": another process or thread has that lock, or waits for
            it. "later": there is no space for a prefetch now. NoSpaceYet: no space until another object has arrived.

        Raises:
            CacheFullError: evicting every unused object would not free enough space or an inode, now or later.
            CorruptDataError: the object is resident and verified, but its size is not the size in `info`.
            UnavailableError: the incoming file cannot be created.
        """
        with self._writing() as (tables, space):
            record = tables.get(info.digest)
            # If the incoming file is not locked, the process that reserved the object has ended, and this call takes
            # over its reservation.
            if record is not None and record.state == RESERVED and self._files.is_incoming_locked(info.digest):
                return "busy"
            if record is not None and record.size_bytes != info.size_bytes:
                space.remove_wrong_size(info, record)
                record = None
            if record is not None and record.state == RESIDENT and self._files.is_there(info.digest, info.size_bytes):
                return "resident"
            lacks_space, min_distance_bytes = False, SPARE_NOTHING
            if record is not None:
                # The object's space is charged already; that of its damaged copy in the quarantine may not be.
                space.count_quarantine(record.tenant)
            else:
                min_distance_bytes = min_distance_of(prefetch, evict=evict)
                lacks_space = not space.make_space(tenant, footprint(info.size_bytes), min_distance_bytes)
            is_locked = None
            if not lacks_space:
                is_locked = self._lock_incoming(info.digest, tables, space, tenant, min_distance_bytes)
            if is_locked is False:
                return "busy"
            if is_locked:
                # A prefetch has no hold on its object, so `_lock_incoming` may have evicted the object itself to free
                # an inode. Read the record again.
                record = tables.get(info.digest)
                # A record means that a reservation is taken over, or a file is verified again: its tenant pays.
                payer = tenant if record is None else record.tenant
                tables.put(info.digest, record, ObjectRecord(RESERVED, info.size_bytes, 0, job_id, payer))
                return "reserved"
            if prefetch is not None:
                return "later"
            # Only a thread that fetches nothing may wait: two fetching threads could wait for each other forever.
            if not self._files.is_fetching_in_this_thread():
                awaited = space.find_incoming(tenant, footprint(info.size_bytes))
                if awaited is not None:
                    return NoSpaceYet(awaited)
            tables.count({"refused": 1})
            refusal = space.refusal(tenant, info) if lacks_space else self._no_inodes()
        # Raised outside the transaction: an error inside would abort it, and undo the counter and removed records.
        raise refusal

    def complete(
        self,
        digest: Digest,
        job_id: str,
        *,
        publish: bool,
        reuse: NextUse | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        """Turn the caller's reservation into a resident, verified object.

        Args:
            digest: the object.
            job_id: job of the caller.
            publish: whether to rename the incoming file to its final name; False: the file is there already.
            reuse: next use of the object; None: unknown.
            counts: numbers to add to counters, by name.
        """
        with self._writing() as (tables, _):
            record = tables.get(digest)
            assert record is not None, digest
            assert (record.state, record.job_id) == (RESERVED, job_id), record
            # Publish before the commit, so that no record ever has the state RESIDENT without its file.
            if publish:
                self._files.publish(digest, record.tenant)
            else:
                self._files.remove_incoming(digest)
            tables.put(digest, record, record._replace(state=RESIDENT, next_use=tables.next_use(job_id, reuse)))
            tables.count(counts)

    def drop(self, digest: Digest, job_id: str) -> None:
        """Remove the caller's reservation, if any, and the incoming file after a failed fetch."""
        with self._writing() as (tables, space):
            record = tables.get(digest)
            if record is not None and (record.state, record.job_id) == (RESERVED, job_id):
                # `forget` also removes the final file, if there is one: without a record, its space is not counted.
                space.forget(digest, record)
            self._files.remove_incoming(digest)

    def release(
        self, digest: Digest, job_id: str, reuse: NextUse | None, counts: Mapping[str, int] | None = None
    ) -> None:
        """Record the next use of an object whose hold the caller is about to release.

        It is not recorded if another running job needs the object as soon or sooner, see `SpaceAllocator.claim`.
        """
        with self._writing() as (tables, space):
            record = tables.get(digest)
            if record is not None and record.state == RESIDENT:
                next_use = tables.next_use(job_id, reuse)
                space.claim(digest, record._replace(job_id=job_id, next_use=next_use))
            tables.count(counts)  # the hits since the last release: counted here to save a transaction

    def expect(self, next_uses: Mapping[Digest, int], job_id: str, now: int, *, passed_only: bool = False) -> None:
        """Record the next uses of objects whose files exist already; see `CacheJob.expect` for the arguments."""
        with self._writing() as (tables, space):
            tables.set_clock(job_id, now)
            for digest, next_use in next_uses.items():
                record = tables.get(digest)
                if record is None or record.state == RESERVED:
                    continue
                is_ahead = record.job_id == job_id and record.next_use >= now
                if not (passed_only and is_ahead):
                    space.claim(digest, record._replace(job_id=job_id, next_use=next_use))

    def shrink(self, digest: Digest, allocated_bytes: int) -> None:
        """Lower the cache's limit to the bytes that fit on a full disk, and evict until the limit is met.

        If the disk lacks inodes, not bytes, keep the limit and evict one object.

        Args:
            digest: object that the caller has reserved and could not write; it is not evicted.
            allocated_bytes: bytes of this object that were written.

        Raises:
            CacheFullError: nothing is left to evict.
        """
        with self._writing() as (tables, space):
            record = tables.get(digest)
            assert record is not None, digest
            if not self._files.has_inodes():
                if evict_for_inode(tables, space, record.tenant):
                    return
                refusal = self._no_inodes()
            else:
                missing_bytes = max(record.used_bytes - allocated_bytes, _MIN_SHRINK_BYTES)
                limit = tables.account().total_bytes - missing_bytes
                old_limit = tables.limit_bytes
                tables.limit_bytes = min(limit, old_limit)
                # 0 more bytes: the reservation of the caller's object is charged already.
                if space.make_space(record.tenant, 0):
                    return
                # This fetch fails. The next one gets the old limit, because the disk may have space again by then.
                tables.limit_bytes = old_limit
                refusal = CacheFullError(
                    f"the disk of the cache {self._files.folder} is full at {max(limit, 0)} bytes of cached objects, "
                    "and every remaining object is in use by a running job or pinned; free space on the disk, or "
                    "lower the budget"
                )
        # Raised outside the transaction: an error inside would abort it, and undo removed records.
        raise refusal

    def free_inode(self) -> None:
        """Evict an object to free an inode for a file such as a lease. Raises CacheFullError if none is left."""
        with self._writing() as (tables, space):
            if evict_for_inode(tables, space, DEFAULT_TENANT):
                return
        raise self._no_inodes()

    def quarantine(self, digest: Digest) -> None:
        """Quarantine or remove the corrupt file of an object that the caller has reserved and fetches again."""
        with self._writing() as (tables, space):
            record = tables.get(digest)
            assert record is not None, digest
            assert record.state == RESERVED, record
            tables.count({"corrupt": 1})
            space.quarantine_or_remove(digest, record.tenant)

    def invalidate(self, digest: Digest, inode: int) -> InvalidateOutcome:
        """Delete the record of a resident object whose bytes are wrong, and quarantine its file.

        Args:
            digest: the object; the caller has released its own hold.
            inode: inode number of the file that the caller has read. The caller still has the file open, so that no
                other file gets this number.

        Returns:
            "unused": no process has a hold on the object. "held": a process has a hold, so the space is freed only
            when it releases the hold. "superseded": another process has already invalidated or replaced that file.
        """
        with self._writing() as (tables, space):
            record = tables.get(digest)
            if record is None or record.state == RESERVED or self._files.inode(digest) != inode:
                return "superseded"
            held = not space.try_lock_exclusive(digest)
            tables.count({"corrupt": 1})
            tables.delete(digest, record)
            space.quarantine(digest, held=held)
            return "held" if held else "unused"

    def evict(self, digests: Iterable[Digest]) -> list[Digest]:
        """Delete objects, also pinned ones, and all quarantined files that are not in use; return those in use.

        The files of objects in use go to the quarantine, which frees their space when their last user has ended.
        """
        held: list[Digest] = []
        with self._writing() as (tables, space):
            space.sweep()
            for digest in digests:
                record = tables.get(digest)
                if record is None:
                    held += [digest] if space.is_quarantined(digest) else []
                    continue
                if space.try_lock_exclusive(digest):
                    space.forget(digest, record)
                    self._files.remove_incoming(digest)
                    continue
                held.append(digest)
                if record.state != RESERVED:
                    tables.delete(digest, record)
                    space.quarantine(digest, held=True)
        return held

    def mark_verified(self, digest: Digest) -> None:
        """Make an object resident if its state is UNVERIFIED. The caller has verified its bytes."""
        with self._writing() as (tables, _):
            record = tables.get(digest)
            if record is not None and record.state == UNVERIFIED:
                tables.put(digest, record, record._replace(state=RESIDENT))

    def pin(self, name: str, digests: Mapping[Digest, int]) -> None:
        """Exclude objects, resident or not, from eviction until `unpin`."""
        with self._writing() as (tables, _):
            for digest in digests:
                tables.pin(digest, name)

    def unpin(self, name: str, digests: Mapping[Digest, int]) -> None:
        """Remove the pin `name` from objects; those without another pin may be evicted."""
        with self._writing() as (tables, _):
            for digest in digests:
                tables.unpin(digest, name)

    def count(self, counts: Mapping[str, int]) -> None:
        """Add numbers to counters, by name."""
        with self._writing() as (tables, _):
            tables.count(counts)

    def jobs(self) -> list[RunningJob]:
        """Return the running jobs that have the cache open."""
        return [
            RunningJob(row.job_id, row.clock_bytes, row.note)
            for row in self.read(CatalogueTables.jobs)
            if row.clock_bytes is not None
            and row.job_id != NO_JOB
            and is_held(self._files.leases, lease_of(row.job_id))
        ]

    def _lock_incoming(
        self, digest: Digest, tables: CatalogueTables, space: SpaceAllocator, tenant: str, min_distance_bytes: int
    ) -> bool | None:
        """Lock the incoming file; evict objects while the disk has no inode for it.

        False: another thread or process has the lock. None: there is no inode, and nothing is left to evict.
        """
        while True:
            try:
                return self._files.lock_incoming(digest)
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
            if not evict_for_inode(tables, space, tenant, min_distance_bytes):
                return None

    def _no_inodes(self) -> CacheFullError:
        return CacheFullError(
            f"the disk of the cache {self._files.folder} has no inodes left for new files (df -i), and every cached "
            "object is in use by a running job or pinned; remove files from the disk"
        )

    def _store_configuration(
        self, tables: CatalogueTables, configuration: Configuration, *, is_changed: bool
    ) -> None:
        if is_changed or not configuration.is_written(self._files.folder):
            # A rebuild of the catalogue takes the configuration from this durable copy.
            configuration.write(self._files.folder)
        tables.configuration = configuration
        tables.limit_bytes = configuration.budget_bytes

    @contextmanager
    def _writing(self) -> Iterator[tuple[CatalogueTables, SpaceAllocator]]:
        """Yield the tables and the space allocator of one write transaction; unlock the victims after the commit."""
        # The contexts close in reverse order: commit, unlock the victims, release `_lock`. The victims' locks exclude
        # other processes only, because the threads of a process share the descriptors. `_lock` excludes the threads
        # too, so it is released last.
        with (
            self._map_errors(),
            self._lock.exclusive(),
            ExitStack() as ending,
            self.env.begin(write=True) as txn,
        ):
            tables = CatalogueTables(self._tables, txn)
            space = SpaceAllocator(tables, self._files, self._locks)
            ending.callback(space.unlock_all)
            yield tables, space

    @contextmanager
    def _map_errors(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise describe_failure(self._files.catalogue, error) from error
        except OSError as error:
            # A transaction also checks, creates and removes files. If this fails, the transaction is aborted.
            raise UnavailableError(
                f"cannot change the files of the cache {self._files.folder}: {error}; check its disk and permissions"
            ) from error
