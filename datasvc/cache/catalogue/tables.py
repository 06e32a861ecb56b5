"""The rows of the catalogue, as one transaction sees them: every change keeps the lists and sums in step.

objects     digest -> Record
order       owner, next use, digest -> bytes freed, tenant: what may be evicted, sorted by when it is needed
reserved    digest: what is on its way
owners      lease, or one order of it, see `lease` -> when it came, its clock, what it calls itself
pins        digest, name of the pin
meta        numbers by name; "u:TENANT" what a tenant uses, "n:NAME" a counter
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import lmdb

from datasvc.cache.catalogue.configuration import Configuration
from datasvc.cache.catalogue.eviction import UNKNOWN
from datasvc.cache.catalogue.lease import is_order
from datasvc.cache.catalogue.quotas import Account
from datasvc.cache.catalogue.records import (
    RESERVED,
    ObjectRecord,
    order_key,
    order_value,
    parse_order_key,
    parse_order_value,
)
from datasvc.order import NextUse
from datasvc.repository import Digest

_TABLES: Final = (b"objects", b"order", b"reserved", b"owners", b"pins", b"meta")
_CONFIGURATION, _LIMIT, _LOST, _SEQUENCE, _BOOT = b"configuration", b"limit", b"lost", b"sequence", b"boot"
_OWNER: Final = struct.Struct("<QQ")
_LAST: Final = b"\xff" * 40
_ENDED: Final = (1 << 64) - 1  # the clock of an order that was closed


class Owner(NamedTuple):
    """Whose objects are listed: a process, or one order of it.

    Attributes:
        sequence: when it came.
        name: its lease, or one of that lease's orders.
        clock_bytes: what it said last; None where it has ended, though its process may live.
        note: what it calls itself.
    """

    sequence: int
    name: str
    clock_bytes: int | None
    note: str


class Tables:
    """The open tables of one database."""

    def __init__(self, env: lmdb.Environment) -> None:
        self.objects, self.order, self.reserved, self.owners, self.pins, self.meta = map(env.open_db, _TABLES)
        self.configurations: dict[bytes, Configuration] = {}  # the last one parsed


class CatalogueTables:
    """The rows, inside one transaction."""

    def __init__(self, tables: Tables, txn: Any) -> None:
        self._tables = tables
        self._txn = txn

    def check(self) -> None:
        """Look at the first and last row of every table. Raises lmdb.Error, ValueError: damaged."""
        tables = self._tables
        for table in (tables.objects, tables.order, tables.reserved, tables.owners, tables.pins, tables.meta):
            cursor = self._txn.cursor(db=table)
            for found in (cursor.first(), cursor.last()):
                if found and table is tables.objects:
                    ObjectRecord.decode(bytes(cursor.value()))

    # Objects.

    def get(self, digest: Digest) -> ObjectRecord | None:
        """Return the record of an object."""
        value = self._txn.get(bytes.fromhex(digest), db=self._tables.objects)
        return None if value is None else ObjectRecord.decode(bytes(value))

    def state(self, digest: Digest) -> int | None:
        """Return the state of an object alone, which every hit asks for; None where it has no record."""
        value = self._txn.get(bytes.fromhex(digest), db=self._tables.objects)
        return None if value is None else ObjectRecord.state_of(value)

    def put(self, digest: Digest, before: ObjectRecord | None, record: ObjectRecord) -> None:
        """Write a record in place of `before`, and list it where it belongs."""
        key = bytes.fromhex(digest)
        if before is not None:
            self.unlist(digest, before)
        self._use(record.tenant, record.used_bytes, before)
        self._txn.put(key, record.encode(), db=self._tables.objects)
        if record.state == RESERVED:
            self._txn.put(key, b"", db=self._tables.reserved)
        elif not self.is_pinned(digest):
            self._know(record.owner)
            order = order_key(record.owner, record.next_use, digest)
            self._txn.put(order, order_value(record), db=self._tables.order)

    def delete(self, digest: Digest, record: ObjectRecord) -> None:
        """Forget an object."""
        self.unlist(digest, record)
        self._txn.delete(bytes.fromhex(digest), db=self._tables.objects)
        self._use(record.tenant, 0, record)

    def unlist(self, digest: Digest, record: ObjectRecord) -> None:
        """Take an object off the lists of what is on its way and what may be evicted."""
        if record.state == RESERVED:
            self._txn.delete(bytes.fromhex(digest), db=self._tables.reserved)
        else:
            self._txn.delete(order_key(record.owner, record.next_use, digest), db=self._tables.order)

    def objects(self) -> Iterator[tuple[Digest, ObjectRecord]]:
        """Yield every record."""
        for key, value in self._txn.cursor(db=self._tables.objects):
            yield Digest(bytes(key).hex()), ObjectRecord.decode(bytes(value))

    def reserved(self) -> list[Digest]:
        """Return what is on its way."""
        keys = self._txn.cursor(db=self._tables.reserved).iternext(values=False)
        return [Digest(bytes(key).hex()) for key in keys]

    def furthest(self, owner: str) -> Iterator[tuple[int, Digest, int, str]]:
        """Yield next use, digest, bytes and tenant of what an owner would have evicted, the furthest use first."""
        prefix = owner.encode() + b"\0"
        cursor = self._txn.cursor(db=self._tables.order)
        found = cursor.prev() if cursor.set_range(prefix + _LAST) else cursor.last()
        while found and bytes(cursor.key()).startswith(prefix):
            _, next_use, digest = parse_order_key(bytes(cursor.key()))
            yield next_use, digest, *parse_order_value(bytes(cursor.value()))
            found = cursor.prev()

    # Owners: the jobs that have the cache open, and those that left something behind.

    def enter(self, owner: str, note: str) -> None:
        """Write down a new owner."""
        value = _OWNER.pack(self.next_sequence(), 0) + note.encode()
        self._txn.put(owner.encode() + b"\0", value, db=self._tables.owners)

    def _know(self, owner: str) -> None:
        # Below one that left, while its objects were pinned, nothing would be found to evict.
        if self._txn.get(owner.encode() + b"\0", db=self._tables.owners) is None:
            self.enter(owner, "")
            if is_order(owner):
                self.end(owner)  # it was entered when it began, and is gone from the list since it ended

    def owner(self, name: str) -> Owner | None:
        """Return an owner; None where none has that name, any more."""
        value = self._txn.get(name.encode() + b"\0", db=self._tables.owners)
        return None if value is None else _parse_owner(name, bytes(value))

    def owners(self) -> list[Owner]:
        """Return the owners in the order in which they came."""
        rows = self._txn.cursor(db=self._tables.owners)
        return sorted(_parse_owner(bytes(key)[:-1].decode(), bytes(value)) for key, value in rows)

    def end(self, owner: str) -> None:
        """Let an owner count as gone, whether its process lives or not."""
        self._set_clock(owner, _ENDED)

    def leave(self, owner: str) -> None:
        """Forget an owner that has nothing left here."""
        prefix = owner.encode() + b"\0"
        cursor = self._txn.cursor(db=self._tables.order)
        if not (cursor.set_range(prefix) and bytes(cursor.key()).startswith(prefix)):
            self._txn.delete(prefix, db=self._tables.owners)

    def next_use(self, owner: str, reuse: NextUse | None) -> int:
        """Return what to write as next use, and take down the owner's clock where it is known."""
        if reuse is None:
            return UNKNOWN + self.next_sequence()
        self.set_clock(owner, reuse.now)
        return reuse.next_use

    def set_clock(self, owner: str, now: int) -> None:
        """Take down an owner's clock, which goes back where a job loads an earlier state; not of one that ended."""
        self._know(owner)
        self._set_clock(owner, now)

    def _set_clock(self, owner: str, now: int) -> None:
        key = owner.encode() + b"\0"
        value = bytes(self._txn.get(key, db=self._tables.owners))
        sequence, clock = _OWNER.unpack_from(value)
        if clock not in (now, _ENDED):
            self._txn.put(key, _OWNER.pack(sequence, now) + value[_OWNER.size :], db=self._tables.owners)

    # Pins.

    def pin(self, digest: Digest, name: str) -> None:
        """Keep an object, which need not be here."""
        record = self.get(digest)
        if record is not None and record.state != RESERVED:
            self.unlist(digest, record)
        self._txn.put(_pin_key(digest, name), b"", db=self._tables.pins)

    def unpin(self, digest: Digest, name: str) -> None:
        """Undo `pin`; the object is listed again unless another pin keeps it."""
        self._txn.delete(_pin_key(digest, name), db=self._tables.pins)
        record = self.get(digest)
        if record is not None:
            self.put(digest, record, record)

    def is_pinned(self, digest: Digest) -> bool:
        """Return whether any pin keeps an object."""
        key = bytes.fromhex(digest)
        cursor = self._txn.cursor(db=self._tables.pins)
        return bool(cursor.set_range(key)) and bytes(cursor.key()).startswith(key)

    def pinned(self) -> set[Digest]:
        """Return every object that a pin keeps."""
        keys = self._txn.cursor(db=self._tables.pins).iternext(values=False)
        return {Digest(bytes(key)[:32].hex()) for key in keys}

    # Settings and sums.

    @property
    def configuration(self) -> Configuration:
        """Budget and quotas."""
        raw = bytes(self._txn.get(_CONFIGURATION, default=b"", db=self._tables.meta))
        found = self._tables.configurations.get(raw)
        if found is None:
            found = Configuration.decode(raw, "catalogue") if raw else Configuration()
            self._tables.configurations = {raw: found}  # replaced in one piece: threads share it
        return found

    @configuration.setter
    def configuration(self, configuration: Configuration) -> None:
        self._txn.put(_CONFIGURATION, configuration.encode(), db=self._tables.meta)

    @property
    def limit_bytes(self) -> int:
        """The budget, or what of it the disk had room for."""
        return self._number(_LIMIT)

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int) -> None:
        self._set_number(_LIMIT, limit_bytes)

    @property
    def lost_bytes(self) -> int:
        """What quarantined files take."""
        return self._number(_LOST)

    @lost_bytes.setter
    def lost_bytes(self, lost_bytes: int) -> None:
        self._set_number(_LOST, lost_bytes)

    @property
    def boot(self) -> str:
        """The boot of the machine for which the catalogue was made; "" for a new one."""
        return bytes(self._txn.get(_BOOT, default=b"", db=self._tables.meta)).decode()

    @boot.setter
    def boot(self, boot: str) -> None:
        self._txn.put(_BOOT, boot.encode(), db=self._tables.meta)

    def account(self) -> Account:
        """Return what tenants use and may use."""
        used = {name: number for name, number in self._numbers(b"u:").items() if number}
        configuration, limit = self.configuration, self.limit_bytes
        return Account(limit, configuration.quotas, used, self.lost_bytes, limit < configuration.budget_bytes)

    def counters(self) -> dict[str, int]:
        """Return the counters by name."""
        return self._numbers(b"n:")

    def count(self, counts: Mapping[str, int] | None) -> None:
        """Add to counters."""
        for name, number in (counts or {}).items():
            if number:
                self._add(b"n:" + name.encode(), number)

    def next_sequence(self) -> int:
        """Return a number that grows with each call, whoever calls."""
        return self._add(_SEQUENCE, 1)

    def _use(self, tenant: str, used_bytes: int, before: ObjectRecord | None) -> None:
        if before is not None and before.tenant == tenant:
            used_bytes -= before.used_bytes
        elif before is not None:
            self._add(b"u:" + before.tenant.encode(), -before.used_bytes)
        if used_bytes:
            self._add(b"u:" + tenant.encode(), used_bytes)

    def _numbers(self, prefix: bytes) -> dict[str, int]:
        found = {}
        cursor = self._txn.cursor(db=self._tables.meta)
        if cursor.set_range(prefix):
            for key, value in cursor:
                if not bytes(key).startswith(prefix):
                    break
                found[bytes(key)[len(prefix) :].decode()] = int(value)
        return found

    def _add(self, name: bytes, change: int) -> int:
        number = self._number(name) + change
        self._set_number(name, number)
        return number

    def _number(self, name: bytes) -> int:
        return int(self._txn.get(name, default=b"0", db=self._tables.meta))

    def _set_number(self, name: bytes, value: int) -> None:
        self._txn.put(name, b"%d" % value, db=self._tables.meta)


def _parse_owner(name: str, value: bytes) -> Owner:
    sequence, clock = _OWNER.unpack_from(value)
    return Owner(sequence, name, None if clock == _ENDED else clock, value[_OWNER.size :].decode())


def _pin_key(digest: Digest, name: str) -> bytes:
    return bytes.fromhex(digest) + name.encode()[:400]
