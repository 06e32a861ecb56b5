"""The tables of the catalogue inside one transaction: every change keeps the indexes and sums consistent.

`Catalogue` and `SpaceAllocator` read and write the catalogue only through `CatalogueTables`. An arrow separates key
and value; the keys of `reserved` and `pins` have no value.

objects     digest -> `ObjectRecord`
order       job, next use, digest -> disk space, tenant: objects that may be evicted, in the order of their next use
reserved    digest: index of the objects that are being fetched
owners      id of a job -> sequence number, clock, note; `Tables.jobs` in the code
pins        digest, name of the pin
meta        name -> value: "u:TENANT" bytes that a tenant uses, "n:NAME" a counter, and settings such as "limit"

The id of a job ends with a zero byte in keys, so that no id is a prefix of another one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import lmdb

from datasvc.cache.catalogue.configuration import Configuration
from datasvc.cache.catalogue.eviction import UNKNOWN
from datasvc.cache.catalogue.object_locks import is_order
from datasvc.cache.catalogue.quotas import Account
from datasvc.cache.catalogue.records import (
    RESERVED,
    ObjectRecord,
    eviction_key,
    eviction_value,
    parse_eviction_key,
    parse_eviction_value,
)
from datasvc.errors import UnavailableError
from datasvc.order import NextUse
from datasvc.repository import Digest

_TABLES: Final = (b"objects", b"order", b"reserved", b"owners", b"pins", b"meta")
# Names in `meta`. "lost" is the name that earlier versions gave to the quarantined bytes.
_CONFIGURATION, _LIMIT, _QUARANTINED, _SEQUENCE, _BOOT = b"configuration", b"limit", b"lost", b"sequence", b"boot"
_JOB: Final = struct.Struct("<QQ")  # sequence number, clock; the note follows
_LAST: Final = b"\xff" * 40  # not less than any next use (8 bytes) and digest (32 bytes) in a key of `order`
_ENDED: Final = (1 << 64) - 1  # the clock of an access order that has ended


class JobRow(NamedTuple):
    """A registered job: a process, or one access order of it.

    Attributes:
        sequence: registration number, ascending.
        job_id: lease of the process, or id of one of its access orders.
        clock_bytes: last reported clock, in bytes served; None: the job has ended, although its process may run.
        note: description of the job, such as the split that it reads; may be empty.
    """

    sequence: int
    job_id: str
    clock_bytes: int | None
    note: str


class Tables:
    """The open LMDB tables of one database."""

    def __init__(self, env: lmdb.Environment) -> None:
        self.objects, self.order, self.reserved, self.jobs, self.pins, self.meta = map(env.open_db, _TABLES)
        # Only the last configuration that was parsed, by its encoded bytes: parsing is slow, and changes are rare.
        self.configurations: dict[bytes, Configuration] = {}


class CatalogueTables:
    """The rows of the catalogue in one LMDB transaction `txn`; methods that only read need no write transaction."""

    def __init__(self, tables: Tables, txn: Any) -> None:
        self._tables = tables
        self._txn = txn

    def check(self) -> None:
        """Read the first and last row of every table. Raises lmdb.Error or ValueError if one is damaged."""
        tables = self._tables
        for table in (tables.objects, tables.order, tables.reserved, tables.jobs, tables.pins, tables.meta):
            cursor = self._txn.cursor(db=table)
            for has_row in (cursor.first(), cursor.last()):
                if has_row and table is tables.objects:
                    ObjectRecord.decode(bytes(cursor.value()))

    # Objects.

    def get(self, digest: Digest) -> ObjectRecord | None:
        """Return the record of an object; None if there is none."""
        value = self._txn.get(bytes.fromhex(digest), db=self._tables.objects)
        return None if value is None else ObjectRecord.decode(bytes(value))

    def state(self, digest: Digest) -> int | None:
        """Return only the state of an object, which every cache hit reads; None if it has no record."""
        value = self._txn.get(bytes.fromhex(digest), db=self._tables.objects)
        return None if value is None else ObjectRecord.state_of(value)

    def put(self, digest: Digest, old: ObjectRecord | None, record: ObjectRecord) -> None:
        """Write a record in place of `old` (None: there is none), and update the indexes and the tenant's bytes."""
        key = bytes.fromhex(digest)
        if old is not None:
            self.unlist(digest, old)
        self._charge(record.tenant, record.used_bytes, old)
        self._txn.put(key, record.encode(), db=self._tables.objects)
        if record.state == RESERVED:
            self._txn.put(key, b"", db=self._tables.reserved)
        elif not self.is_pinned(digest):  # eviction reads only `order`, so it never visits a pinned object
            self._ensure_registered(record.job_id)
            order_key = eviction_key(record.job_id, record.next_use, digest)
            self._txn.put(order_key, eviction_value(record), db=self._tables.order)

    def delete(self, digest: Digest, record: ObjectRecord) -> None:
        """Delete the record of an object, and its index entries."""
        self.unlist(digest, record)
        self._txn.delete(bytes.fromhex(digest), db=self._tables.objects)
        self._charge(record.tenant, 0, record)

    def unlist(self, digest: Digest, record: ObjectRecord) -> None:
        """Remove an object from the index that lists it: `reserved` for a fetch in progress, otherwise `order`."""
        if record.state == RESERVED:
            self._txn.delete(bytes.fromhex(digest), db=self._tables.reserved)
        else:
            self._txn.delete(eviction_key(record.job_id, record.next_use, digest), db=self._tables.order)

    def object_rows(self) -> list[tuple[bytes, bytes]]:
        """Return every record as it is stored, for `parse_objects`."""
        return list(self._txn.cursor(db=self._tables.objects))

    def reserved(self) -> list[Digest]:
        """Return the objects that are being fetched."""
        keys = self._txn.cursor(db=self._tables.reserved).iternext(values=False)
        return [Digest(bytes(key).hex()) for key in keys]

    def furthest(self, job_id: str) -> Iterator[tuple[int, Digest, int, str]]:
        """Yield next use, digest, bytes and tenant of each evictable object of a job, the furthest next use first."""
        prefix = job_id.encode() + b"\0"
        cursor = self._txn.cursor(db=self._tables.order)
        # Go to the first row after those of the job, or to the end. The row before has the furthest next use.
        has_row = cursor.prev() if cursor.set_range(prefix + _LAST) else cursor.last()
        while has_row and bytes(cursor.key()).startswith(prefix):
            _, next_use, digest = parse_eviction_key(bytes(cursor.key()))
            yield next_use, digest, *parse_eviction_value(bytes(cursor.value()))
            has_row = cursor.prev()

    # Jobs: those that have the cache open, and ended ones of which `order` still lists objects.

    def register(self, job_id: str, note: str) -> None:
        """Add a job; its clock starts at 0."""
        value = _JOB.pack(self.next_sequence(), 0) + note.encode()
        self._txn.put(job_id.encode() + b"\0", value, db=self._tables.jobs)

    def _ensure_registered(self, job_id: str) -> None:
        # Eviction finds objects only through registered jobs. A job can be unregistered while all its objects are
        # pinned and so not listed in `order`. Such an object may be listed again later.
        if self._txn.get(job_id.encode() + b"\0", db=self._tables.jobs) is None:
            self.register(job_id, "")
            if is_order(job_id):
                self.retire(job_id)  # an access order registers when it starts, so a missing one has ended

    def job(self, job_id: str) -> JobRow | None:
        """Return a registered job; None if there is none with that id."""
        value = self._txn.get(job_id.encode() + b"\0", db=self._tables.jobs)
        return None if value is None else _parse_job(job_id, bytes(value))

    def jobs(self) -> list[JobRow]:
        """Return the registered jobs in the order of registration."""
        rows = self._txn.cursor(db=self._tables.jobs)
        return sorted(_parse_job(bytes(key)[:-1].decode(), bytes(value)) for key, value in rows)

    def retire(self, job_id: str) -> None:
        """Mark a job as ended, whether its process runs or not."""
        self._set_clock(job_id, _ENDED)

    def unregister(self, job_id: str) -> None:
        """Delete a job unless the index `order` still lists objects of it."""
        # Eviction finds objects only through registered jobs.
        prefix = job_id.encode() + b"\0"
        cursor = self._txn.cursor(db=self._tables.order)
        if not (cursor.set_range(prefix) and bytes(cursor.key()).startswith(prefix)):
            self._txn.delete(prefix, db=self._tables.jobs)

    def next_use(self, job_id: str, reuse: NextUse | None) -> int:
        """Return the next use to store, and set the job's clock. If `reuse` is None, only return an unknown one."""
        if reuse is None:
            return UNKNOWN + self.next_sequence()
        self.set_clock(job_id, reuse.now)
        return reuse.next_use

    def set_clock(self, job_id: str, now: int) -> None:
        """Set a job's clock unless the job has ended. `now` is lower than before if the job restored a checkpoint."""
        self._ensure_registered(job_id)
        self._set_clock(job_id, now)

    def _set_clock(self, job_id: str, now: int) -> None:
        key = job_id.encode() + b"\0"
        value = bytes(self._txn.get(key, db=self._tables.jobs))
        sequence, clock = _JOB.unpack_from(value)
        # An ended job stays ended; an unchanged clock needs no write.
        if clock not in (now, _ENDED):
            self._txn.put(key, _JOB.pack(sequence, now) + value[_JOB.size :], db=self._tables.jobs)

    # Pins.

    def pin(self, digest: Digest, name: str) -> None:
        """Add a pin to an object, resident or not; remove it from the index `order`, so that it is not evicted."""
        record = self.get(digest)
        if record is not None and record.state != RESERVED:
            self.unlist(digest, record)
        self._txn.put(_pin_key(digest, name), b"", db=self._tables.pins)

    def unpin(self, digest: Digest, name: str) -> None:
        """Undo `pin`; the object may be evicted again unless it has another pin."""
        self._txn.delete(_pin_key(digest, name), db=self._tables.pins)
        record = self.get(digest)
        if record is not None:
            self.put(digest, record, record)  # lists the object in `order` again, unless it has another pin

    def is_pinned(self, digest: Digest) -> bool:
        """Return whether an object has a pin."""
        key = bytes.fromhex(digest)
        cursor = self._txn.cursor(db=self._tables.pins)
        return bool(cursor.set_range(key)) and bytes(cursor.key()).startswith(key)

    def pinned(self) -> set[Digest]:
        """Return every pinned object, resident or not."""
        keys = self._txn.cursor(db=self._tables.pins).iternext(values=False)
        return {Digest(bytes(key)[:32].hex()) for key in keys}

    # Settings and sums.

    @property
    def configuration(self) -> Configuration:
        """Budget and quotas."""
        raw = bytes(self._txn.get(_CONFIGURATION, default=b"", db=self._tables.meta))
        configuration = self._tables.configurations.get(raw)
        if configuration is None:
            configuration = Configuration.decode(raw, "catalogue") if raw else Configuration()
            # A new dictionary instead of a change of the old one, which other threads may be reading.
            self._tables.configurations = {raw: configuration}
        return configuration

    @configuration.setter
    def configuration(self, configuration: Configuration) -> None:
        self._txn.put(_CONFIGURATION, configuration.encode(), db=self._tables.meta)

    @property
    def limit_bytes(self) -> int:
        """The budget, or a lower limit that was set when the disk was full. Bytes."""
        return self._number(_LIMIT)

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int) -> None:
        self._set_number(_LIMIT, limit_bytes)

    @property
    def quarantined_bytes(self) -> int:
        """Disk space of quarantined files."""
        return self._number(_QUARANTINED)

    @quarantined_bytes.setter
    def quarantined_bytes(self, quarantined_bytes: int) -> None:
        self._set_number(_QUARANTINED, quarantined_bytes)

    @property
    def boot(self) -> str:
        """Id of the boot of the machine in which the catalogue was built; "" for a new catalogue."""
        return bytes(self._txn.get(_BOOT, default=b"", db=self._tables.meta)).decode()

    @boot.setter
    def boot(self, boot: str) -> None:
        self._txn.put(_BOOT, boot.encode(), db=self._tables.meta)

    def account(self) -> Account:
        """Return the disk space that each tenant uses, and the limits."""
        used = {name: number for name, number in self._numbers(b"u:").items() if number}
        configuration, limit = self.configuration, self.limit_bytes
        return Account(limit, configuration.quotas, used, self.quarantined_bytes, limit < configuration.budget_bytes)

    def counters(self) -> dict[str, int]:
        """Return the counters by name, since the catalogue was created."""
        return self._numbers(b"n:")

    def count(self, counts: Mapping[str, int] | None) -> None:
        """Add numbers to counters, by name."""
        for name, number in (counts or {}).items():
            if number:
                self._add(b"n:" + name.encode(), number)

    def next_sequence(self) -> int:
        """Return a number that is larger than all those returned before, over all processes."""
        return self._add(_SEQUENCE, 1)

    def _charge(self, tenant: str, used_bytes: int, old: ObjectRecord | None) -> None:
        """Charge `used_bytes` to a tenant, in place of the bytes of the record `old`."""
        if old is not None and old.tenant == tenant:
            used_bytes -= old.used_bytes
        elif old is not None:
            self._add(b"u:" + old.tenant.encode(), -old.used_bytes)
        if used_bytes:
            self._add(b"u:" + tenant.encode(), used_bytes)

    def _numbers(self, prefix: bytes) -> dict[str, int]:
        """Return the numbers in `meta` whose names start with a prefix, by the rest of the name."""
        numbers = {}
        cursor = self._txn.cursor(db=self._tables.meta)
        if cursor.set_range(prefix):
            for key, value in cursor:
                if not bytes(key).startswith(prefix):
                    break
                numbers[bytes(key)[len(prefix) :].decode()] = int(value)
        return numbers

    def _add(self, name: bytes, change: int) -> int:
        number = self._number(name) + change
        self._set_number(name, number)
        return number

    def _number(self, name: bytes) -> int:
        return int(self._txn.get(name, default=b"0", db=self._tables.meta))

    def _set_number(self, name: bytes, value: int) -> None:
        self._txn.put(name, b"%d" % value, db=self._tables.meta)


def parse_objects(rows: Iterable[tuple[bytes, bytes]]) -> dict[Digest, ObjectRecord]:
    """Return the records of `CatalogueTables.object_rows`."""
    return {Digest(key.hex()): ObjectRecord.decode(value) for key, value in rows}


def _parse_job(job_id: str, value: bytes) -> JobRow:
    sequence, clock = _JOB.unpack_from(value)
    return JobRow(sequence, job_id, None if clock == _ENDED else clock, value[_JOB.size :].decode())


def _pin_key(digest: Digest, name: str) -> bytes:
    # Cut, because LMDB keys have at most 511 bytes. The pin's file has the full name.
    return bytes.fromhex(digest) + name.encode()[:400]


class UnusableCatalogueError(UnavailableError):
    """The database cannot be used by this process any more, but another process can open it."""


def describe_failure(path: Path, error: lmdb.Error) -> UnavailableError:
    """Return the error to raise for a failure of the database at `path`."""
    if isinstance(error, lmdb.PanicError):
        # After a failed write of its meta page, LMDB refuses every transaction until the process opens it again.
        return UnusableCatalogueError(
            f"the cache catalogue {path} cannot be used by this process any more, because its disk failed during a "
            f"write ({error}): check the disk (`dmesg`), and start this process again; no cached object is lost"
        )
    return UnavailableError(
        f"the cache catalogue {path} failed: {error}. If it is damaged, end the jobs that use it and remove that "
        "folder: the next process that opens the cache rebuilds it, and no cached object is lost"
    )
