"""The catalogue of a node's cache: what is resident and reserved, for whom. LMDB, one write at a time.

Guards the budget: space is reserved here before a byte is fetched, and no reservation takes reserved + resident
over it. Files get their name inside the transaction that says so, and lose it inside the one that forgets them.

A reservation stands exactly as long as the lock of its incoming file: the lock is taken before the reservation is
visible and freed after it is completed or dropped, so a free lock means that whoever fetched is gone. What is mapped
is held by locks outside the catalogue (`holds`): whoever evicts seizes the lock until its transaction is through.

LMDB runs without fsync: a crash of a process loses nothing, and after a crash of the machine the catalogue is made
again from the files, each verified before it is used (`recovery`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Literal, NamedTuple

import lmdb

from datasvc.cache.catalogue.configuration import Configuration
from datasvc.cache.catalogue.eviction import distance_bytes
from datasvc.cache.catalogue.files import Files, ScannedFiles
from datasvc.cache.catalogue.lease import is_held, lease_of
from datasvc.cache.catalogue.object_locks import Holds
from datasvc.cache.catalogue.quotas import Account
from datasvc.cache.catalogue.records import RESERVED, RESIDENT, UNVERIFIED, ObjectRecord, footprint
from datasvc.cache.catalogue.space import NOBODY, SPARE_NOTHING, SPARE_WANTED, SpaceAllocator
from datasvc.cache.catalogue.tables import CatalogueTables, Tables
from datasvc.errors import CacheFullError, CorruptDataError, UnavailableError
from datasvc.order import NextUse
from datasvc.repository import Digest, ObjectInfo


class NoSpaceYet(NamedTuple):
    """There may be room once what others fetch has come.

    Attributes:
        digest: one object that is on its way.
    """

    digest: Digest


Reservation = Literal["resident", "reserved", "busy", "later"] | NoSpaceYet
RESIDENT_ALREADY: Final = "resident"
BUSY: Final = "busy"
LATER: Final = "later"
GRANTED: Final = "reserved"

EvictOutcome = Literal["free", "mapped", "judged"]
FREE: Final = "free"
MAPPED: Final = "mapped"
JUDGED: Final = "judged"

_MAP_BYTES: Final = 4 << 30  # address space, not memory: room for some ten million objects
_MIN_SHRINK_BYTES: Final = 64 << 10  # also where the disk took all but some note beside: each turn evicts


class CacheJob(NamedTuple):
    """A process that has the cache open, or one of its orders.

    Attributes:
        lease_id: of the process; an order's has a number after a dot.
        clock_bytes: what its order has served, as it said last.
        note: what it calls itself.
    """

    lease_id: str
    clock_bytes: int
    note: str


class Catalogue:
    """The catalogue below one cache folder. Open it once in a process, through `recovery.open_catalogue`.

    Args:
        files: of the cache.
        holds: of this process.

    Raises:
        lmdb.Error: it cannot be opened, or is damaged.
    """

    def __init__(self, files: Files, holds: Holds) -> None:
        self._files = files
        self._holds = holds
        self.env = lmdb.open(
            str(files.catalogue), max_dbs=8, map_size=_MAP_BYTES, sync=False, metasync=False, max_readers=1024
        )
        # Readers killed in the middle would keep old pages, and the file growing, for ever.
        self.env.reader_check()
        self._tables = Tables(self.env)
        self._one_thread = threading.Lock()

    def close(self) -> None:
        """Close the database."""
        self.env.close()

    def check(self) -> None:
        """Look at the ends of every table. Raises lmdb.Error, ValueError: damaged."""
        with self.env.begin() as txn:
            CatalogueTables(self._tables, txn).check()

    def configure(self, change: Callable[[Configuration], Configuration]) -> None:
        """Change budget and quotas for all processes of the node, and evict what is over and held by nobody.

        Where they stay as they are nothing is evicted. A budget that a full disk had cut short counts in full again.

        Args:
            change: returns what shall hold, given what does.

        Raises:
            ConfigError: as `change` does.
            OSError: it cannot be written.
        """
        with self._writing() as (rows, room):
            configuration = change(rows.configuration)
            is_new = configuration != rows.configuration
            self._keep(rows, configuration, is_new=is_new)
            if is_new and configuration.budget_bytes:  # otherwise none is known: what lies there stays until one is
                room.keep_quotas()

    def rebuild(self, configuration: Configuration, found: Iterable[ScannedFiles], boot: str) -> None:
        """Fill a new catalogue with what lies in the folder; what is over the budget is evicted, and nothing else."""
        with self._writing() as (rows, room):
            rows.boot = boot
            rows.enter(NOBODY, "")
            for each in found:
                record = ObjectRecord(UNVERIFIED, each.size_bytes, rows.next_use(NOBODY, None), NOBODY, each.tenant)
                rows.put(each.digest, None, record)
            self._keep(rows, configuration, is_new=False)
            if configuration.budget_bytes:
                room.keep_budget()

    def enter(self, owner: str, note: str) -> None:
        """Let a process or an order in, before it reserves anything."""
        with self._writing() as (rows, _):
            rows.enter(owner, note)

    def end(self, owner: str) -> None:
        """Let an order count as gone, though its process lives: what it leaves goes first. Not to be undone."""
        with self._writing() as (rows, _):
            if rows.owner(owner) is not None:
                rows.end(owner)

    def ready(self, info: ObjectInfo) -> bool:
        """Return whether an object, which the caller holds, is resident and verified: what a hit costs."""
        try:
            with self.env.begin() as txn:
                state = CatalogueTables(self._tables, txn).state(info.digest)
        except lmdb.Error as error:
            raise self._failed(error) from error
        return state == RESIDENT and self._files.is_there(info.digest, info.size_bytes)

    def reserve(
        self, info: ObjectInfo, lease_id: str, tenant: str, *, prefetch: NextUse | None = None, evict: bool = True
    ) -> Reservation:
        """Find an object resident, or reserve the space to fetch it.

        Args:
            info: the object; who is not prefetching holds it already.
            lease_id: of the caller.
            tenant: whose budget it uses.
            prefetch: when it is needed; then nothing is evicted that is needed sooner.
            evict: whether anything is evicted that anybody may need again.

        Returns:
            RESIDENT_ALREADY: its file is there and was verified. GRANTED: the caller has the lock of the incoming
            file and must see to it that the file gets there, then `complete`, or `drop`. BUSY: another process or
            thread has that lock, or waits for it; wait for it and call again. LATER: no room for a prefetch.
            NoSpaceYet: no room before that object has come; likewise.

        Raises:
            CacheFullError: evicting all that nobody holds would not make room, and nothing is on its way that might.
            CorruptDataError: the object has another size.
            OSError: the incoming file cannot be made.
        """
        with self._writing() as (rows, room):
            record = rows.get(info.digest)
            if record is not None and record.state == RESERVED and self._files.is_incoming_locked(info.digest):
                return BUSY
            if record is not None and record.size_bytes != info.size_bytes:
                self._forget_wrong_size(rows, room, info, record)
                record = None
            if record is not None and record.state == RESIDENT and self._files.is_there(info.digest, info.size_bytes):
                return RESIDENT_ALREADY
            refused = False
            if record is not None:
                room.count_quarantine(record.tenant)
            else:
                nearest = SPARE_NOTHING if prefetch is None else prefetch.next_use - prefetch.now
                nearest = nearest if evict else max(nearest, SPARE_WANTED)
                refused = not room.make(tenant, footprint(info.size_bytes), nearest)
                if refused and prefetch is not None:
                    return LATER
            if not refused:
                if not self._files.lock_incoming(info.digest):
                    return BUSY
                # A record that is left has its space already: of a fetch that died, or of a file to verify.
                payer = tenant if record is None else record.tenant
                rows.put(info.digest, record, ObjectRecord(RESERVED, info.size_bytes, 0, lease_id, payer))
                return GRANTED
            # Who waits for a fetch has none under way itself, so no two wait for each other.
            if not self._files.is_fetching_in_this_thread():
                awaited = room.on_its_way(tenant, footprint(info.size_bytes))
                if awaited is not None:
                    return NoSpaceYet(awaited)
            rows.count({"refused": 1})
            refusal = room.refusal(tenant, info)
        # Raised out here: what was swept and counted stays so.
        raise refusal

    def complete(
        self,
        digest: Digest,
        lease_id: str,
        *,
        publish: bool,
        reuse: NextUse | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        """Turn the caller's reservation into a resident object, verified.

        Args:
            digest: the object.
            lease_id: of the caller.
            publish: give the incoming file its name; otherwise the file is there already.
            reuse: when it is needed, where the caller knows.
            counts: counters to add to.
        """
        with self._writing() as (rows, _):
            record = rows.get(digest)
            assert record is not None, digest
            assert (record.state, record.owner) == (RESERVED, lease_id), record
            if publish:
                self._files.publish(digest, record.tenant)
            else:
                self._files.remove_incoming(digest)
            rows.put(digest, record, record._replace(state=RESIDENT, next_use=rows.next_use(lease_id, reuse)))
            rows.count(counts)

    def drop(self, digest: Digest, lease_id: str, counts: Mapping[str, int] | None = None) -> None:
        """Forget the caller's reservation, where it has one: a fetch that failed."""
        with self._writing() as (rows, room):
            record = rows.get(digest)
            if record is not None and (record.state, record.owner) == (RESERVED, lease_id):
                # Published, or lying there unverified: no record counts it any more.
                room.forget(digest, record)
            self._files.remove_incoming(digest)
            rows.count(counts)

    def release(
        self, digest: Digest, lease_id: str, reuse: NextUse | None, counts: Mapping[str, int] | None = None
    ) -> None:
        """Say that the caller is about to let go of an object, and when it needs it again."""
        with self._writing() as (rows, room):
            record = rows.get(digest)
            if record is not None and record.state == RESIDENT:
                next_use = rows.next_use(lease_id, reuse)
                _claim(rows, room, digest, record._replace(owner=lease_id, next_use=next_use))
            rows.count(counts)

    def expect(self, next_uses: Mapping[Digest, int], lease_id: str, now: int, *, passed_only: bool = False) -> None:
        """Say when the caller needs objects that are resident already; they count as its own from here on.

        Args:
            next_uses: on the caller's clock.
            lease_id: of the caller.
            now: what the caller's clock says.
            passed_only: leave those of the caller alone whose next use is yet to come.
        """
        with self._writing() as (rows, room):
            rows.set_clock(lease_id, now)
            for digest, next_use in next_uses.items():
                record = rows.get(digest)
                if record is None or record.state == RESERVED:
                    continue
                if not (passed_only and record.owner == lease_id and record.next_use >= now):
                    _claim(rows, room, digest, record._replace(owner=lease_id, next_use=next_use))

    def shrink(self, digest: Digest, allocated_bytes: int) -> None:
        """Lower the limit to what the disk held when it was full, and make room below it for the caller.

        Args:
            digest: what the caller has reserved and could not write.
            allocated_bytes: what of it the disk took.

        Raises:
            CacheFullError: nothing is left to evict.
        """
        with self._writing() as (rows, room):
            record = rows.get(digest)
            assert record is not None, digest
            missing = max(record.used_bytes - allocated_bytes, _MIN_SHRINK_BYTES)
            before, limit = rows.limit_bytes, rows.account().total_bytes - missing
            rows.limit_bytes = min(limit, before)
            if room.make(record.tenant, 0):
                return
            # The caller's fetch fails, and the next may find a disk with room again.
            rows.limit_bytes = before
        raise CacheFullError(
            f"the disk of the cache {self._files.folder} is full at {limit} bytes of cached objects, and all that is "
            "left is held by running jobs or pinned: free space on the disk, or lower the budget"
        )

    def quarantine(self, digest: Digest) -> None:
        """Take the bad file of an object that the caller has a reservation on out of use, and count it."""
        with self._writing() as (rows, room):
            record = rows.get(digest)
            assert record is not None, digest
            assert record.state == RESERVED, record
            rows.count({"corrupt": 1})
            room.quarantine_or_remove(digest, record.tenant)

    def condemn(self, digest: Digest, inode: int) -> EvictOutcome:
        """Take an object whose bytes are wrong out of use, and count it; the file is kept until its room is needed.

        Args:
            digest: the object, of which the caller lets go first.
            inode: of the file that was read, which the caller has open so that no other has its number.

        Returns:
            FREE; MAPPED, where somebody holds it, so that its room is free only once they let go; JUDGED, where it
            is that file no longer: somebody else was faster.
        """
        with self._writing() as (rows, room):
            record = rows.get(digest)
            if record is None or record.state == RESERVED or self._files.inode(digest) != inode:
                return JUDGED
            mapped = not room.seize(digest)
            rows.count({"corrupt": 1})
            rows.delete(digest, record)
            room.quarantine(digest, mapped=mapped)
            return MAPPED if mapped else FREE

    def verified(self, digest: Digest) -> None:
        """Say that the bytes of an object that a scan found are right."""
        with self._writing() as (rows, _):
            record = rows.get(digest)
            if record is not None and record.state == UNVERIFIED:
                rows.put(digest, record, record._replace(state=RESIDENT))

    def pin(self, name: str, digests: Mapping[Digest, int]) -> None:
        """Keep objects until `unpin`, also those that are not here yet."""
        with self._writing() as (rows, _):
            for digest in digests:
                rows.pin(digest, name)

    def unpin(self, name: str, digests: Mapping[Digest, int]) -> None:
        """Let objects be evicted that no other pin keeps."""
        with self._writing() as (rows, _):
            for digest in digests:
                rows.unpin(digest, name)

    def count(self, counts: Mapping[str, int]) -> None:
        """Add to counters."""
        with self._writing() as (rows, _):
            rows.count(counts)

    @property
    def configuration(self) -> Configuration:
        """Budget and quotas."""
        with self._reading() as rows:
            return rows.configuration

    @property
    def boot(self) -> str:
        """The boot of the machine for which the catalogue was made; "" for a new one."""
        with self._reading() as rows:
            return rows.boot

    def account(self) -> Account:
        """Return what tenants use and may use."""
        with self._reading() as rows:
            return rows.account()

    def counters(self) -> dict[str, int]:
        """Return what was counted since the catalogue was made, by name."""
        with self._reading() as rows:
            return rows.counters()

    def record(self, digest: Digest) -> ObjectRecord | None:
        """Return what is known of one object."""
        with self._reading() as rows:
            return rows.get(digest)

    def records(self) -> dict[Digest, ObjectRecord]:
        """Return every record."""
        with self._reading() as rows:
            return dict(rows.objects())

    def pinned(self) -> set[Digest]:
        """Return what is pinned, here or not."""
        with self._reading() as rows:
            return rows.pinned()

    def jobs(self) -> list[CacheJob]:
        """Return the processes that have the cache open."""
        with self._reading() as rows:
            owners = rows.owners()
        return [
            CacheJob(owner.name, owner.clock_bytes, owner.note)
            for owner in owners
            if owner.clock_bytes is not None
            and owner.name != NOBODY
            and is_held(self._files.leases, lease_of(owner.name))
        ]

    def _keep(self, rows: CatalogueTables, configuration: Configuration, *, is_new: bool) -> None:
        if is_new or not configuration.is_written(self._files.folder):
            configuration.write(self._files.folder)
        rows.configuration = configuration
        rows.limit_bytes = configuration.budget_bytes

    def _forget_wrong_size(
        self, rows: CatalogueTables, room: SpaceAllocator, info: ObjectInfo, record: ObjectRecord
    ) -> None:
        if record.state == RESIDENT:
            # Its digest was right, so it is the caller who is wrong; others may have it mapped.
            raise CorruptDataError(
                f"object {info.digest[:12]}... has {record.size_bytes} bytes, and {info.size_bytes} are asked for: "
                "the table that says so is wrong"
            )
        rows.count({"corrupt": 1 if record.state == UNVERIFIED else 0})
        room.forget(info.digest, record)
        self._files.remove_incoming(info.digest)

    @contextmanager
    def _writing(self) -> Iterator[tuple[CatalogueTables, SpaceAllocator]]:
        """Yield the rows to change and the room to make; what is seized is let go of after the transaction."""
        # Until all is let go: what the next thread of this process seizes is seized by the same descriptor.
        with self._one_thread, ExitStack() as ending, self._translated(), self.env.begin(write=True) as txn:
            rows = CatalogueTables(self._tables, txn)
            room = SpaceAllocator(rows, self._files, self._holds, self.env.reader_check)
            ending.callback(room.let_go)
            yield rows, room

    @contextmanager
    def _reading(self) -> Iterator[CatalogueTables]:
        with self._translated(), self.env.begin() as txn:
            yield CatalogueTables(self._tables, txn)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise self._failed(error) from error

    def _failed(self, error: lmdb.Error) -> UnavailableError:
        return describe_failure(self._files.catalogue, error)


def describe_failure(path: Path, error: lmdb.Error) -> UnavailableError:
    """Return what to tell a user of a database that failed."""
    if isinstance(error, lmdb.LockError):
        # LMDB locks a byte per process id: https://github.com/LMDB/lmdb, mdb.c, mdb_reader_pid.
        return UnavailableError(
            f"the cache catalogue {path} is in use by a process of the same process id as this one ({os.getpid()}): "
            "they run in containers with process ids of their own. Give them those of the node (Kubernetes: hostPID: "
            "true; Docker: --pid=host), or let one `datasvc serve` per node have the cache"
        )
    return UnavailableError(
        f"the cache catalogue {path} failed: {error}. If it is damaged: end the jobs that use it and remove that "
        "folder; the next to open the cache makes it anew, nothing cached is lost"
    )


def _claim(rows: CatalogueTables, room: SpaceAllocator, digest: Digest, claim: ObjectRecord) -> None:
    """Write down when an owner needs an object, unless another that lives needs it as soon.

    What its own process said counts for nothing: that was before the order was known.
    """
    record, own = rows.get(digest), rows.owner(claim.owner)
    assert record is not None
    other = None if record.owner in {claim.owner, lease_of(claim.owner)} else rows.owner(record.owner)
    if other is not None:
        own_bytes = distance_bytes(claim.next_use, None if own is None else own.clock_bytes)
        if distance_bytes(record.next_use, other.clock_bytes) <= own_bytes and room.is_alive(other):
            return
    rows.put(digest, record, claim)
