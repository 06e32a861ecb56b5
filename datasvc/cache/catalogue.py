"""The catalogue of a node's cache: what is resident, reserved and held, by whom. LMDB, one write at a time.

Guards the budget: space is reserved here before a byte is fetched, and `reserved + resident <= budget` holds after
every transaction. Files of evicted objects are unlinked inside the transaction that frees their space.

LMDB runs without fsync: a crash of a process loses nothing, and after a crash of the machine every object is
verified again before it is used (entries carry the boot in which they were verified).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import lmdb

from datasvc.cache.eviction import Candidate, choose_victims
from datasvc.cache.files import Files
from datasvc.cache.lease import is_held
from datasvc.errors import CacheFullError, ConfigError, CorruptDataError
from datasvc.repository import Digest, ObjectInfo

CATALOGUE_FORMAT = 1
_MAP_BYTES = 1 << 30  # address space, not memory: room for millions of objects


@dataclass(frozen=True)
class Record:
    """What the catalogue knows of an object.

    Attributes:
        size_bytes: as its shard table says; counts against the budget from the reservation on.
        state: "reserved" while its bytes arrive, then "resident".
        owner: lease of the process that fetches or fetched it.
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


class Catalogue:
    """The catalogue below one cache folder. Open it once in a process (`Cache` sees to it).

    Args:
        folder: the cache's folder.
        leases: its folder of leases.

    Raises:
        ConfigError: the catalogue has a later format.
        CorruptDataError: it cannot be opened.
    """

    def __init__(self, folder: Path, leases: Path) -> None:
        self._leases = leases
        try:
            self._env = lmdb.open(
                str(folder), max_dbs=3, map_size=_MAP_BYTES, sync=False, metasync=False, max_readers=1024
            )
            self._objects = self._env.open_db(b"objects")
            self._holds = self._env.open_db(b"holds")
            self._meta = self._env.open_db(b"meta")
        except lmdb.Error as error:
            raise CorruptDataError(
                f"the cache catalogue {folder} cannot be opened: {error}. A cache holds copies only: remove the "
                "whole cache folder and stage again"
            ) from error
        self._check_format(folder)

    def close(self) -> None:
        """Close the database."""
        self._env.close()

    def budget(self) -> int:
        """Return the budget in bytes, 0 when none was ever set."""
        with self._reading() as txn:
            return self._number(txn, b"budget")

    def set_budget(self, budget_bytes: int) -> None:
        """Set the budget for all processes of the node. What is over it is evicted by the next reservation."""
        with self._writing() as txn:
            txn.put(b"budget", str(budget_bytes).encode(), db=self._meta)

    def reserve(self, info: ObjectInfo, lease_id: str, files: Files) -> Record | None:
        """Hold an object that is resident, or reserve the space to fetch it.

        Args:
            info: the object.
            lease_id: of the caller, which holds the object from here on either way.
            files: where the node's files are; victims are removed from there, and the object's lock is taken
                there when the space becomes reserved.

        Returns:
            The record: "resident", or "reserved" and the caller must fetch. None when another living process,
            or thread, fetches it just now: wait for its lock and try again.

        Raises:
            CacheFullError: evicting all that nobody holds would not make room.
        """
        with self._writing() as txn:
            record = self._get(txn, info.digest)
            if record is not None and record.state == "resident":
                self._put_hold(txn, info.digest, lease_id)
                return record
            if record is not None and (record.owner == lease_id or is_held(self._leases, record.owner)):
                return None
            if record is not None:
                txn.delete(info.digest.encode(), db=self._objects)
            self._make_room(txn, info, files)
            reserved = Record(info.size_bytes, "reserved", lease_id)
            self._put(txn, info.digest, reserved)
            self._put_hold(txn, info.digest, lease_id)
            # Locked before the reservation is visible: who sees it can wait for the lock.
            files.lock_incoming(info.digest)
            return reserved

    def complete(self, digest: Digest, boot: str) -> None:
        """Turn a reservation into a resident object: its file is in place, verified in boot `boot`."""
        with self._writing() as txn:
            record = self._get(txn, digest)
            assert record is not None, digest
            self._put(txn, digest, replace(record, state="resident", boot=boot))

    def drop(self, digest: Digest, lease_id: str, *, corrupt: bool) -> None:
        """Forget an object: a fetch that failed, or bytes that turned out bad (counted when `corrupt`)."""
        with self._writing() as txn:
            txn.delete(digest.encode(), db=self._objects)
            txn.delete(_hold_key(digest, lease_id), db=self._holds)
            if corrupt:
                txn.put(b"corrupt", str(self._number(txn, b"corrupt") + 1).encode(), db=self._meta)

    def count_corrupt(self) -> None:
        """Count an object that arrived with bad bytes."""
        with self._writing() as txn:
            txn.put(b"corrupt", str(self._number(txn, b"corrupt") + 1).encode(), db=self._meta)

    def release(self, digest: Digest, lease_id: str) -> None:
        """Give up a hold; the object may be evicted once nobody holds it."""
        with self._writing() as txn:
            txn.delete(_hold_key(digest, lease_id), db=self._holds)
            record = self._get(txn, digest)
            if record is not None:
                sequence = self._number(txn, b"sequence") + 1
                txn.put(b"sequence", str(sequence).encode(), db=self._meta)
                self._put(txn, digest, replace(record, released=sequence))

    def usage(self) -> Usage:
        """Return how full the cache is; dead holders count as gone."""
        with self._reading() as txn:
            records = dict(self._records(txn))
            held = self._held(txn)
            return Usage(
                budget_bytes=self._number(txn, b"budget"),
                resident_bytes=sum(each.size_bytes for each in records.values() if each.state == "resident"),
                reserved_bytes=sum(each.size_bytes for each in records.values() if each.state == "reserved"),
                held_bytes=sum(each.size_bytes for digest, each in records.items() if digest in held),
                num_resident=sum(each.state == "resident" for each in records.values()),
                num_corrupt=self._number(txn, b"corrupt"),
            )

    def resident(self) -> dict[Digest, Record]:
        """Return all resident objects."""
        with self._reading() as txn:
            return {digest: each for digest, each in self._records(txn) if each.state == "resident"}

    def _make_room(self, txn: lmdb.Transaction, info: ObjectInfo, files: Files) -> None:
        """Evict until `info` fits, or raise CacheFullError and evict nothing."""
        self._sweep_dead(txn, files)
        records = dict(self._records(txn))
        budget = self._number(txn, b"budget")
        used = sum(record.size_bytes for record in records.values())
        needed = used + info.size_bytes - budget
        if needed <= 0:
            return
        held = self._held(txn)
        free = [
            Candidate(digest, record.size_bytes, record.released)
            for digest, record in records.items()
            if record.state == "resident" and digest not in held
        ]
        victims = choose_victims(free, needed)
        if victims is None:
            evictable = sum(candidate.size_bytes for candidate in free)
            raise CacheFullError(
                f"no room for {info.size_bytes} bytes: of the budget of {budget} bytes {used - evictable} are held "
                f"by running jobs or on their way; raise the budget by at least {needed - evictable} bytes"
            )
        for victim in victims:
            txn.delete(victim.digest.encode(), db=self._objects)
            files.object_path(victim.digest).unlink(missing_ok=True)

    def _sweep_dead(self, txn: lmdb.Transaction, files: Files) -> None:
        """Drop holds and reservations of processes that are gone."""
        alive: dict[str, bool] = {}
        holds = [bytes(key) for key in txn.cursor(db=self._holds).iternext(values=False)]
        for key in holds:
            _, _, lease_id = key.decode().partition(":")
            if not alive.setdefault(lease_id, is_held(self._leases, lease_id)):
                txn.delete(key, db=self._holds)
        for digest, record in list(self._records(txn)):
            if record.state == "reserved" and not is_held(self._leases, record.owner):
                txn.delete(digest.encode(), db=self._objects)
                files.incoming_path(digest).unlink(missing_ok=True)

    def _held(self, txn: lmdb.Transaction) -> set[Digest]:
        alive: dict[str, bool] = {}
        held = set()
        for key in txn.cursor(db=self._holds).iternext(values=False):
            digest, _, lease_id = bytes(key).decode().partition(":")
            if alive.setdefault(lease_id, is_held(self._leases, lease_id)):
                held.add(Digest(digest))
        return held

    def _records(self, txn: lmdb.Transaction) -> Iterator[tuple[Digest, Record]]:
        for key, value in txn.cursor(db=self._objects):
            yield Digest(bytes(key).decode()), Record(**json.loads(bytes(value)))

    def _get(self, txn: lmdb.Transaction, digest: Digest) -> Record | None:
        value = txn.get(digest.encode(), db=self._objects)
        return None if value is None else Record(**json.loads(bytes(value)))

    def _put(self, txn: lmdb.Transaction, digest: Digest, record: Record) -> None:
        txn.put(digest.encode(), json.dumps(asdict(record)).encode(), db=self._objects)

    def _put_hold(self, txn: lmdb.Transaction, digest: Digest, lease_id: str) -> None:
        txn.put(_hold_key(digest, lease_id), b"", db=self._holds)

    def _number(self, txn: lmdb.Transaction, name: bytes) -> int:
        return int(txn.get(name, default=b"0", db=self._meta))

    def _check_format(self, folder: Path) -> None:
        with self._writing() as txn:
            found = self._number(txn, b"format")
            if found > CATALOGUE_FORMAT:
                raise ConfigError(
                    f"the cache catalogue {folder} has format {found}; this datasvc reads up to "
                    f"{CATALOGUE_FORMAT}: upgrade it, or use another cache folder"
                )
            txn.put(b"format", str(CATALOGUE_FORMAT).encode(), db=self._meta)

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        with self._env.begin(write=True) as txn:
            yield txn

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        with self._env.begin() as txn:
            yield txn


def _hold_key(digest: Digest, lease_id: str) -> bytes:
    return f"{digest}:{lease_id}".encode()
