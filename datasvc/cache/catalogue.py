"""The catalogue of a node's cache: what is resident, reserved and held, by whom. LMDB, one write at a time.

Guards the budget: space is reserved here before a byte is fetched, and no reservation takes reserved + resident
over it. Files get their name inside the transaction that says so, and lose it inside the one that forgets them.

A reservation stands exactly as long as the lock of its incoming file: the lock is taken before the reservation is
visible and freed after it is completed or dropped, so a free lock means that whoever fetched is gone.

LMDB runs without fsync: a crash of a process loses nothing, and after a crash of the machine every object is
verified again before it is used (records carry the boot in which they were verified).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import lmdb

from datasvc.cache.eviction import Candidate, choose_victims
from datasvc.cache.files import Files
from datasvc.cache.lease import is_held
from datasvc.errors import CacheFullError, ConfigError, CorruptDataError, UnavailableError
from datasvc.repository import Digest, ObjectInfo

CATALOGUE_FORMAT = 1
_MAP_BYTES = 1 << 30  # address space, not memory: room for millions of objects
_BUDGET, _USED, _SEQUENCE, _CORRUPT, _FORMAT = b"budget", b"used", b"sequence", b"corrupt", b"format"


@dataclass(frozen=True)
class Record:
    """What the catalogue knows of an object.

    Attributes:
        size_bytes: as its shard table says; counts against the budget from the reservation on.
        state: "reserved" while its bytes arrive or are verified again, then "resident".
        owner: lease of the process that fetches it, or released it last.
        boot: boot of this machine in which its bytes were verified last.
        released: sequence number of its last release.
    """

    size_bytes: int
    state: Literal["reserved", "resident"]
    owner: str
    boot: str = ""
    released: int = 0


@dataclass(frozen=True)
class Usage:
    """How full a cache is. Bytes, but for the counts."""

    budget_bytes: int
    resident_bytes: int
    reserved_bytes: int
    held_bytes: int
    num_resident: int
    num_corrupt: int


Reservation = Literal["resident", "reserved", "busy"]
RESIDENT: Final = "resident"
RESERVED: Final = "reserved"
BUSY: Final = "busy"


class Catalogue:
    """The catalogue below one cache folder. Open it once in a process (`Cache` sees to it).

    Args:
        files: of the cache.

    Raises:
        ConfigError: the catalogue has a later format.
        CorruptDataError: it is damaged.
        UnavailableError: it cannot be opened.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        try:
            self._env = lmdb.open(
                str(files.catalogue), max_dbs=3, map_size=_MAP_BYTES, sync=False, metasync=False, max_readers=1024
            )
            # Readers killed in the middle would keep old pages, and the file growing, for ever.
            self._env.reader_check()
            self._objects = self._env.open_db(b"objects")
            self._holds = self._env.open_db(b"holds")
            self._meta = self._env.open_db(b"meta")
        except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError) as error:
            raise CorruptDataError(
                f"the cache catalogue {files.catalogue} is damaged: {error}. A cache holds copies only: remove "
                "the whole cache folder and stage again"
            ) from error
        except lmdb.Error as error:
            raise UnavailableError(f"the cache catalogue {files.catalogue} cannot be opened: {error}") from error
        self._check_format()

    def close(self) -> None:
        """Close the database."""
        self._env.close()

    def budget(self) -> int:
        """Return the budget in bytes, 0 when none was ever set."""
        with self._reading() as txn:
            return self._number(txn, _BUDGET)

    def set_budget(self, budget_bytes: int) -> None:
        """Set the budget for all processes of the node, and evict what is over it and held by nobody."""
        with self._writing() as txn:
            self._set_number(txn, _BUDGET, budget_bytes)
            self._sweep_dead(txn)
            free = self._evictable(txn)
            over = self._number(txn, _USED) - budget_bytes
            victims = choose_victims(free, over)
            self._evict(txn, free if victims is None else victims)

    def reserve(self, info: ObjectInfo, lease_id: str, boot: str) -> Reservation:
        """Hold an object that is resident, or reserve the space to fetch it.

        Args:
            info: the object.
            lease_id: of the caller, which holds the object from here on unless the answer is "busy".
            boot: this boot of the machine.

        Returns:
            "resident": its file is there and was verified in this boot. "reserved": the caller has the lock of
            the incoming file and must see to it that the file gets there, then `complete`, or `drop`. "busy":
            another process or thread has that lock; wait for it and call again.

        Raises:
            CacheFullError: evicting all that nobody holds would not make room.
            OSError: the incoming file cannot be made.
        """
        with self._writing() as txn:
            record = self._get(txn, info.digest)
            if record is not None and record.state == RESERVED and self._files.is_incoming_locked(info.digest):
                return BUSY
            if record is not None and record.state == RESIDENT and self._is_ready(info.digest, record, boot):
                self._put_hold(txn, info.digest, lease_id)
                return RESIDENT
            self._files.lock_incoming(info.digest)
            if record is None:
                self._make_room(txn, info)
            # A record that is left has its space already: of a fetch that died, or of a file to verify again.
            self._put(txn, info.digest, Record(info.size_bytes, RESERVED, lease_id))
            self._put_hold(txn, info.digest, lease_id)
            return RESERVED

    def complete(self, digest: Digest, lease_id: str, boot: str, *, publish: bool) -> None:
        """Turn the caller's reservation into a resident object, verified in boot `boot`.

        Args:
            digest: the object.
            lease_id: of the caller.
            boot: this boot of the machine.
            publish: give the incoming file its name; otherwise the file is there already.
        """
        with self._writing() as txn:
            record = self._get(txn, digest)
            assert record is not None, digest
            assert (record.state, record.owner) == (RESERVED, lease_id), record
            if publish:
                self._files.publish(digest)
            self._put(txn, digest, replace(record, state=RESIDENT, boot=boot))

    def drop(self, digest: Digest, lease_id: str) -> None:
        """Forget the caller's reservation, and its hold, where it has one: a fetch that failed."""
        with self._writing() as txn:
            record = self._get(txn, digest)
            if record is not None and (record.state, record.owner) == (RESERVED, lease_id):
                self._delete(txn, digest, record)
                txn.delete(_hold_key(digest, lease_id), db=self._holds)
                # Published, or lying there unverified: no record counts it any more.
                self._files.object_path(digest).unlink(missing_ok=True)

    def count_corrupt(self) -> None:
        """Count an object that was found with bad bytes."""
        with self._writing() as txn:
            self._set_number(txn, _CORRUPT, self._number(txn, _CORRUPT) + 1)

    def release(self, digest: Digest, lease_id: str) -> None:
        """Give up a hold; the object may be evicted once nobody holds it."""
        with self._writing() as txn:
            txn.delete(_hold_key(digest, lease_id), db=self._holds)
            record = self._get(txn, digest)
            if record is not None and record.state == RESIDENT:
                sequence = self._number(txn, _SEQUENCE) + 1
                self._set_number(txn, _SEQUENCE, sequence)
                self._put(txn, digest, replace(record, released=sequence, owner=lease_id))

    def usage(self) -> Usage:
        """Return how full the cache is; dead holders count as gone."""
        with self._reading() as txn:
            records = dict(self._records(txn))
            held = self._held(txn)
            return Usage(
                budget_bytes=self._number(txn, _BUDGET),
                resident_bytes=sum(each.size_bytes for each in records.values() if each.state == RESIDENT),
                reserved_bytes=sum(each.size_bytes for each in records.values() if each.state == RESERVED),
                held_bytes=sum(each.size_bytes for digest, each in records.items() if digest in held),
                num_resident=sum(each.state == RESIDENT for each in records.values()),
                num_corrupt=self._number(txn, _CORRUPT),
            )

    def _is_ready(self, digest: Digest, record: Record, boot: str) -> bool:
        return record.boot == boot and self._files.object_path(digest).exists()

    def _make_room(self, txn: lmdb.Transaction, info: ObjectInfo) -> None:
        """Evict until `info` fits, or raise CacheFullError and evict nothing."""
        if self._missing(txn, info) <= 0:
            return
        self._sweep_dead(txn)
        missing = self._missing(txn, info)
        free = self._evictable(txn)
        victims = choose_victims(free, missing)
        if victims is None:
            evictable = sum(candidate.size_bytes for candidate in free)
            budget, used = self._number(txn, _BUDGET), self._number(txn, _USED)
            raise CacheFullError(
                f"no room for {info.size_bytes} bytes: of the budget of {budget} bytes {used - evictable} are held "
                f"by running jobs or on their way; raise the budget by at least {missing - evictable} bytes"
            )
        self._evict(txn, victims)

    def _missing(self, txn: lmdb.Transaction, info: ObjectInfo) -> int:
        return self._number(txn, _USED) + info.size_bytes - self._number(txn, _BUDGET)

    def _evictable(self, txn: lmdb.Transaction) -> list[Candidate]:
        held = self._held(txn)
        alive: dict[str, bool] = {}
        return [
            Candidate(digest, record.size_bytes, record.released, is_stale=not self._is_alive(record.owner, alive))
            for digest, record in self._records(txn)
            if record.state == RESIDENT and digest not in held
        ]

    def _evict(self, txn: lmdb.Transaction, victims: list[Candidate]) -> None:
        for victim in victims:
            self._files.object_path(victim.digest).unlink(missing_ok=True)
            record = self._get(txn, victim.digest)
            assert record is not None
            self._delete(txn, victim.digest, record)

    def _sweep_dead(self, txn: lmdb.Transaction) -> None:
        """Drop holds and reservations of processes that are gone."""
        self._env.reader_check()
        alive: dict[str, bool] = {}
        for key in [bytes(key) for key in txn.cursor(db=self._holds).iternext(values=False)]:
            if not self._is_alive(key.decode().partition(":")[2], alive):
                txn.delete(key, db=self._holds)
        for digest, record in list(self._records(txn)):
            if record.state == RESERVED and not self._files.is_incoming_locked(digest):
                self._delete(txn, digest, record)
                self._files.incoming_path(digest).unlink(missing_ok=True)
                self._files.object_path(digest).unlink(missing_ok=True)

    def _held(self, txn: lmdb.Transaction) -> set[Digest]:
        alive: dict[str, bool] = {}
        pairs = (bytes(key).decode().split(":") for key in txn.cursor(db=self._holds).iternext(values=False))
        return {Digest(digest) for digest, lease_id in pairs if self._is_alive(lease_id, alive)}

    def _is_alive(self, lease_id: str, known: dict[str, bool]) -> bool:
        if lease_id not in known:
            known[lease_id] = is_held(self._files.leases, lease_id)
        return known[lease_id]

    def _records(self, txn: lmdb.Transaction) -> Iterator[tuple[Digest, Record]]:
        for key, value in txn.cursor(db=self._objects):
            yield Digest(bytes(key).decode()), Record(**json.loads(bytes(value)))

    def _get(self, txn: lmdb.Transaction, digest: Digest) -> Record | None:
        value = txn.get(digest.encode(), db=self._objects)
        return None if value is None else Record(**json.loads(bytes(value)))

    def _put(self, txn: lmdb.Transaction, digest: Digest, record: Record) -> None:
        before = self._get(txn, digest)
        change = record.size_bytes - (before.size_bytes if before else 0)
        if change:
            self._set_number(txn, _USED, self._number(txn, _USED) + change)
        txn.put(digest.encode(), json.dumps(asdict(record)).encode(), db=self._objects)

    def _delete(self, txn: lmdb.Transaction, digest: Digest, record: Record) -> None:
        txn.delete(digest.encode(), db=self._objects)
        self._set_number(txn, _USED, self._number(txn, _USED) - record.size_bytes)

    def _put_hold(self, txn: lmdb.Transaction, digest: Digest, lease_id: str) -> None:
        txn.put(_hold_key(digest, lease_id), b"", db=self._holds)

    def _number(self, txn: lmdb.Transaction, name: bytes) -> int:
        return int(txn.get(name, default=b"0", db=self._meta))

    def _set_number(self, txn: lmdb.Transaction, name: bytes, value: int) -> None:
        txn.put(name, str(value).encode(), db=self._meta)

    def _check_format(self) -> None:
        with self._writing() as txn:
            found = self._number(txn, _FORMAT)
            if found > CATALOGUE_FORMAT:
                raise ConfigError(
                    f"the cache catalogue {self._files.catalogue} has format {found}; this datasvc reads up to "
                    f"{CATALOGUE_FORMAT}: upgrade it, or use another cache folder"
                )
            self._set_number(txn, _FORMAT, CATALOGUE_FORMAT)

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        with self._translated(), self._env.begin(write=True) as txn:
            yield txn

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        with self._translated(), self._env.begin() as txn:
            yield txn

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise UnavailableError(f"the cache catalogue {self._files.catalogue} failed: {error}") from error


def _hold_key(digest: Digest, lease_id: str) -> bytes:
    return f"{digest}:{lease_id}".encode()
