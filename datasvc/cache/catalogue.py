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

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, NamedTuple

import lmdb

from datasvc.cache.configuration import Configuration
from datasvc.cache.eviction import Candidate, by_distance, choose_victims, distance_bytes
from datasvc.cache.file_links import FileLink
from datasvc.cache.files import Files
from datasvc.cache.holds import Holds
from datasvc.cache.lease import is_held, lease_of
from datasvc.cache.quotas import DEFAULT_TENANT, Account
from datasvc.cache.records import RESERVED, RESIDENT, UNVERIFIED, Record, footprint
from datasvc.cache.rows import Rows, Tables
from datasvc.errors import CacheFullError, CorruptDataError, UnavailableError
from datasvc.order import NEVER, Reuse
from datasvc.repository import Digest, ObjectInfo

Reservation = Literal["resident", "reserved", "busy", "later"]
RESIDENT_ALREADY: Final = "resident"
BUSY: Final = "busy"
LATER: Final = "later"
GRANTED: Final = "reserved"

_MAP_BYTES: Final = 4 << 30  # address space, not memory: room for some ten million objects
_SPARE_NOTHING: Final = -NEVER
_SPARE_ALL: Final = NEVER * 4
_LEAST_SHRINK_BYTES: Final = 64 << 10  # also where the disk took all but some note beside: each turn evicts
_NOBODY: Final = ""  # owner of what a scan found
_MAPPED: Final = ".mapped"  # ends the name of a file in quarantine that jobs had mapped


class Job(NamedTuple):
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
            Rows(self._tables, txn).check()

    def configure(self, change: Callable[[Configuration], Configuration]) -> None:
        """Change budget and quotas for all processes of the node, and evict what is over and held by nobody.

        A budget that a full disk had cut short counts in full again.

        Args:
            change: returns what shall hold, given what does.

        Raises:
            ConfigError: as `change` does.
            OSError: it cannot be written.
        """
        with self._writing() as (rows, seized):
            configuration = change(rows.configuration)
            if configuration != rows.configuration or not configuration.is_written(self._files.folder):
                configuration.write(self._files.folder)
            rows.configuration = configuration
            rows.limit_bytes = configuration.budget_bytes
            if not configuration.budget_bytes:
                return  # none is known yet: what lies there stays until one is
            self._sweep_dead(rows)
            for tenant in rows.account().used_bytes:
                self._evict(rows, choose_victims(self._candidates(rows, seized), rows.account(), tenant, 0))

    def rebuild(self, configuration: Configuration, found: Mapping[Digest, int], boot: str) -> None:
        """Fill a new catalogue with what lies in the folder, size by digest; what is over the budget is evicted."""
        with self._writing() as (rows, _):
            rows.boot = boot
            rows.enter(_NOBODY, "")
            for digest, size_bytes in found.items():
                record = Record(UNVERIFIED, size_bytes, rows.next_use(_NOBODY, None), _NOBODY, DEFAULT_TENANT)
                rows.put(digest, None, record)
        self.configure(lambda _: configuration)

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
                record = Rows(self._tables, txn).get(info.digest)
        except lmdb.Error as error:
            raise self._failed(error) from error
        return record is not None and record.state == RESIDENT and self._files.is_there(info.digest, info.size_bytes)

    def reserve(
        self, info: ObjectInfo, lease_id: str, tenant: str, *, prefetch: Reuse | None = None, evict: bool = True
    ) -> Reservation:
        """Find an object resident, or reserve the space to fetch it.

        Args:
            info: the object; who is not prefetching holds it already.
            lease_id: of the caller.
            tenant: whose budget it uses.
            prefetch: when it is needed; then nothing is evicted that is needed sooner.
            evict: whether anything is evicted at all.

        Returns:
            RESIDENT_ALREADY: its file is there and was verified. GRANTED: the caller has the lock of the incoming
            file and must see to it that the file gets there, then `complete`, or `drop`. BUSY: another process or
            thread has that lock; wait for it and call again. LATER: no room for a prefetch.

        Raises:
            CacheFullError: evicting all that nobody holds would not make room.
            CorruptDataError: the object has another size.
            OSError: the incoming file cannot be made.
        """
        with self._writing() as (rows, seized):
            record = rows.get(info.digest)
            if record is not None and record.state == RESERVED and self._files.is_incoming_locked(info.digest):
                return BUSY
            if record is not None and record.size_bytes != info.size_bytes:
                self._forget_wrong_size(rows, info, record)
                record = None
            if record is not None and record.state == RESIDENT and self._files.is_there(*_pair(info)):
                return RESIDENT_ALREADY
            refused = False
            if record is not None:
                self._count_quarantine(rows, record.tenant)
            else:
                nearest = _SPARE_NOTHING if prefetch is None else prefetch.next_use - prefetch.now
                nearest = nearest if evict else _SPARE_ALL
                refused = not self._make_room(rows, seized, tenant, footprint(info.size_bytes), nearest)
                if refused and prefetch is not None:
                    return LATER
            if not refused:
                self._files.lock_incoming(info.digest)
                # A record that is left has its space already: of a fetch that died, or of a file to verify.
                payer = tenant if record is None else record.tenant
                rows.put(info.digest, record, Record(RESERVED, info.size_bytes, 0, lease_id, payer))
                return GRANTED
            rows.count({"refused": 1})
            refusal = _full(rows, tenant, info)
        # Raised out here: what was swept and counted stays so.
        raise refusal

    def complete(
        self,
        digest: Digest,
        lease_id: str,
        *,
        publish: bool,
        reuse: Reuse | None = None,
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
                self._files.publish(digest)
            else:
                self._files.remove_incoming(digest)
            rows.put(digest, record, record._replace(state=RESIDENT, next_use=rows.next_use(lease_id, reuse)))
            rows.count(counts)

    def drop(self, digest: Digest, lease_id: str, counts: Mapping[str, int] | None = None) -> None:
        """Forget the caller's reservation, where it has one: a fetch that failed."""
        with self._writing() as (rows, _):
            record = rows.get(digest)
            if record is not None and (record.state, record.owner) == (RESERVED, lease_id):
                # Published, or lying there unverified: no record counts it any more.
                self._forget(rows, digest, record)
            self._files.remove_incoming(digest)
            rows.count(counts)

    def release(
        self, digest: Digest, lease_id: str, reuse: Reuse | None, counts: Mapping[str, int] | None = None
    ) -> None:
        """Say that the caller is about to let go of an object, and when it needs it again."""
        with self._writing() as (rows, _):
            record = rows.get(digest)
            if record is not None and record.state == RESIDENT:
                next_use = rows.next_use(lease_id, reuse)
                self._claim(rows, digest, record, lease_id, next_use)
            rows.count(counts)

    def expect(self, next_uses: Mapping[Digest, int], lease_id: str, now: int, *, passed_only: bool = False) -> None:
        """Say when the caller needs objects that are resident already; they count as its own from here on.

        Args:
            next_uses: on the caller's clock.
            lease_id: of the caller.
            now: what the caller's clock says.
            passed_only: leave those of the caller alone whose next use is yet to come.
        """
        with self._writing() as (rows, _):
            rows.set_clock(lease_id, now)
            for digest, next_use in next_uses.items():
                record = rows.get(digest)
                if record is None or record.state == RESERVED:
                    continue
                if not (passed_only and record.owner == lease_id and record.next_use >= now):
                    self._claim(rows, digest, record, lease_id, next_use)

    def _claim(self, rows: Rows, digest: Digest, record: Record, owner: str, next_use: int) -> None:
        """Write down when an owner needs an object, unless another that lives needs it as soon."""
        if record.owner not in (owner, lease_of(owner)):  # of its process: from before anything was known of it
            own, other = rows.owner(owner), rows.owner(record.owner)
            own_bytes = distance_bytes(next_use, None if own is None else own.clock_bytes)
            clock = None if other is None else other.clock_bytes
            if distance_bytes(record.next_use, clock) <= own_bytes and clock is not None:
                if self._is_alive(record.owner):
                    return
        rows.put(digest, record, record._replace(next_use=next_use, owner=owner))

    def shrink(self, digest: Digest, allocated_bytes: int) -> None:
        """Lower the limit to what the disk held when it was full, and make room below it for the caller.

        Args:
            digest: what the caller has reserved and could not write.
            allocated_bytes: what of it the disk took.

        Raises:
            CacheFullError: nothing is left to evict.
        """
        with self._writing() as (rows, seized):
            record = rows.get(digest)
            assert record is not None, digest
            missing = max(record.used_bytes - allocated_bytes, _LEAST_SHRINK_BYTES)
            before, limit = rows.limit_bytes, rows.account().total_bytes - missing
            rows.limit_bytes = min(limit, before)
            if self._make_room(rows, seized, record.tenant, 0):
                return
            # The caller's fetch fails, and the next may find a disk with room again.
            rows.limit_bytes = before
        raise CacheFullError(
            f"the disk of the cache {self._files.folder} is full at {limit} bytes of cached objects, and all that is "
            "left is held by running jobs or pinned: free space on the disk, or lower the budget"
        )

    def quarantine(self, digest: Digest, *, reserved: bool, mapped: bool = False) -> bool:
        """Take an object whose bytes are wrong out of use, and count it; the file is kept until its room is needed.

        Args:
            digest: the object.
            reserved: the caller has a reservation on it, which stays for the fetch; otherwise it is forgotten.
            mapped: jobs have it mapped, so that its room is free only once they let go.

        Returns:
            False where somebody else was faster.
        """
        with self._writing() as (rows, _):
            record = rows.get(digest)
            if record is None or (record.state == RESERVED) != reserved:
                return False
            rows.count({"corrupt": 1})
            if not reserved:
                rows.delete(digest, record)
            path = self._files.object_path(digest)
            found_bytes = _footprint_of(path)
            if reserved and rows.account().missing(record.tenant, found_bytes) > 0:
                path.unlink(missing_ok=True)
            elif found_bytes:
                kept = self._files.quarantine / f"{digest}{_MAPPED if mapped else ''}"
                rows.lost_bytes += found_bytes - _footprint_of(kept)
                path.replace(kept)
            return True

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

    def record(self, digest: Digest) -> Record | None:
        """Return what is known of one object."""
        with self._reading() as rows:
            return rows.get(digest)

    def records(self) -> dict[Digest, Record]:
        """Return every record."""
        with self._reading() as rows:
            return dict(rows.objects())

    def pinned(self) -> set[Digest]:
        """Return what is pinned, here or not."""
        with self._reading() as rows:
            return rows.pinned()

    def jobs(self) -> list[Job]:
        """Return the processes that have the cache open."""
        with self._reading() as rows:
            owners = rows.owners()
        living = [owner for owner in owners if owner.clock_bytes is not None and self._is_alive(owner.name)]
        return [Job(owner.name, owner.clock_bytes or 0, owner.note) for owner in living]

    def _make_room(
        self, rows: Rows, seized: list[Digest], tenant: str, size_bytes: int, nearest_bytes: int = _SPARE_NOTHING
    ) -> bool:
        """Evict until `tenant` may use `size_bytes` more; False, and nothing evicted, where that cannot be."""
        if rows.account().missing(tenant, size_bytes) <= 0:
            return True
        self._sweep_dead(rows)
        account = rows.account()
        candidates = self._candidates(rows, seized)
        victims = choose_victims(candidates, account, tenant, size_bytes, nearest_bytes=nearest_bytes)
        if account.missing(tenant, size_bytes) > 0:
            return False
        self._evict(rows, victims)
        return True

    def _candidates(self, rows: Rows, seized: list[Digest]) -> Iterator[Candidate]:
        """Yield what may be evicted, first what goes first; each is seized, so that nobody holds it meanwhile."""
        living = []
        for _, name, clock, _ in rows.owners():
            if clock is not None and self._is_alive(name):
                living.append(self._queue(rows, seized, name, clock))
            else:
                yield from self._queue(rows, seized, name, None)
        yield from by_distance(living)

    def _queue(self, rows: Rows, seized: list[Digest], owner: str, clock: int | None) -> Iterator[Candidate]:
        for next_use, digest, freed_bytes, tenant in rows.furthest(owner):
            if self._holds.seize(digest):
                seized.append(digest)
                yield Candidate(digest, freed_bytes, tenant, distance_bytes(next_use, clock))

    def _evict(self, rows: Rows, victims: list[Candidate]) -> None:
        for victim in victims:
            record = rows.get(victim.digest)
            assert record is not None
            self._forget(rows, victim.digest, record)
        rows.count({"evicted": len(victims), "evicted_bytes": sum(victim.freed_bytes for victim in victims)})

    def _forget(self, rows: Rows, digest: Digest, record: Record) -> None:
        self._files.object_path(digest).unlink(missing_ok=True)
        FileLink(self._files.folder, digest).remove()
        rows.delete(digest, record)

    def _sweep_dead(self, rows: Rows) -> None:
        """Remove what goes before anything of use: bad files, and what fetches and owners left that are gone."""
        rows.lost_bytes = self._empty_quarantine()
        self.env.reader_check()
        for digest in rows.reserved():
            record = rows.get(digest)
            assert record is not None
            if not self._files.is_incoming_locked(digest):
                self._forget(rows, digest, record)
                self._files.remove_incoming(digest)
        for _, name, clock, _ in rows.owners():
            if clock is None or not self._is_alive(name):
                rows.leave(name)

    def _count_quarantine(self, rows: Rows, tenant: str) -> None:
        """Count a bad file that was moved by a process killed before it said so; it goes where its room is needed."""
        rows.lost_bytes = sum(map(_footprint_of, self._files.quarantine.iterdir()))
        if rows.account().missing(tenant, 0) > 0:
            rows.lost_bytes = self._empty_quarantine()

    def _empty_quarantine(self) -> int:
        """Remove the files in quarantine; returns the bytes of those that jobs have mapped still."""
        kept_bytes = 0
        for path in self._files.quarantine.iterdir():
            digest = Digest(path.name.removesuffix(_MAPPED))
            if path.name.endswith(_MAPPED) and self._holds.is_held(digest):
                kept_bytes += _footprint_of(path)
            else:
                path.unlink(missing_ok=True)
        return kept_bytes

    def _forget_wrong_size(self, rows: Rows, info: ObjectInfo, record: Record) -> None:
        if record.state == RESIDENT:
            # Its digest was right, so it is the caller who is wrong; others may have it mapped.
            raise CorruptDataError(
                f"object {info.digest[:12]}... has {record.size_bytes} bytes, and {info.size_bytes} are asked for: "
                "the table that says so is wrong"
            )
        rows.count({"corrupt": 1 if record.state == UNVERIFIED else 0})
        self._forget(rows, info.digest, record)
        self._files.remove_incoming(info.digest)

    def _is_alive(self, owner: str) -> bool:
        return owner != _NOBODY and is_held(self._files.leases, lease_of(owner))

    @contextmanager
    def _writing(self) -> Iterator[tuple[Rows, list[Digest]]]:
        """Yield the rows to change, and a list for what is seized: let go of once the transaction is through."""
        seized: list[Digest] = []
        # Until all is let go: what the next thread of this process seizes is seized by the same descriptor.
        with self._one_thread:
            try:
                with self._translated(), self.env.begin(write=True) as txn:
                    yield Rows(self._tables, txn), seized
            finally:
                for digest in seized:
                    self._holds.let_go(digest)

    @contextmanager
    def _reading(self) -> Iterator[Rows]:
        with self._translated(), self.env.begin() as txn:
            yield Rows(self._tables, txn)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise self._failed(error) from error

    def _failed(self, error: lmdb.Error) -> UnavailableError:
        return UnavailableError(
            f"the cache catalogue {self._files.catalogue} failed: {error}. If it is damaged: end the jobs that use "
            "it and remove that folder; the next to open the cache makes it anew, nothing cached is lost"
        )


def _footprint_of(path: Path) -> int:
    try:
        return footprint(path.stat().st_size)
    except FileNotFoundError:
        return 0


def _pair(info: ObjectInfo) -> tuple[Digest, int]:
    return info.digest, info.size_bytes


def _full(rows: Rows, tenant: str, info: ObjectInfo) -> CacheFullError:
    account, budget = rows.account(), rows.configuration.budget_bytes
    cut = (
        f", of which the disk had room for {account.budget_bytes} (set it again once it has more)"
        if account.is_cut
        else ""
    )
    share = f"; tenant {tenant!r} may use {account.available(tenant)} of them" if account.quotas else ""
    missing = account.missing(tenant, footprint(info.size_bytes))
    return CacheFullError(
        f"no room for {info.size_bytes} bytes: the budget is {budget} bytes{cut}{share}; {account.total_bytes} are "
        "taken, and what could go is not enough: the rest is held by running jobs, on its way, pinned, or guaranteed "
        f"to other tenants; raise the budget by at most {missing} bytes, unpin something, or wait for a job to end"
    )
