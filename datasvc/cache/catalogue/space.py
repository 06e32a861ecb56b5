"""Making room in a cache: what is swept, seized, evicted and put into quarantine inside one write transaction.

What goes is chosen by `eviction`; here it is made sure that nobody holds it, and that files and rows go together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from datasvc.cache.catalogue.eviction import EvictionCandidate, by_distance, choose_victims, distance_bytes
from datasvc.cache.catalogue.file_links import FileLink
from datasvc.cache.catalogue.files import Files
from datasvc.cache.catalogue.lease import is_held, lease_of
from datasvc.cache.catalogue.object_locks import Holds
from datasvc.cache.catalogue.quotas import Account
from datasvc.cache.catalogue.records import ObjectRecord, footprint
from datasvc.cache.catalogue.tables import CatalogueTables, Owner
from datasvc.errors import CacheFullError
from datasvc.order import NEVER
from datasvc.repository import Digest, ObjectInfo

NOBODY: Final = ""
"""Owner of what a scan found, and a tenant that has nothing."""
SPARE_NOTHING: Final = -NEVER
SPARE_WANTED: Final = NEVER // 2
"""As far as that is nobody's next use, known or not: beyond lies what will not be used, or its job is gone."""

_MAPPED: Final = ".mapped"  # ends the name of a file in quarantine that jobs had mapped


class SpaceAllocator:
    """The room of one cache, inside one write transaction.

    Args:
        rows: as the transaction sees them.
        files: of the cache.
        holds: of this process.
        forget_readers: frees what readers that died keep of the database.
    """

    def __init__(
        self, rows: CatalogueTables, files: Files, holds: Holds, forget_readers: Callable[[], object]
    ) -> None:
        self._rows = rows
        self._files = files
        self._holds = holds
        self._forget_readers = forget_readers
        self._seized: list[Digest] = []
        self._living: dict[str, bool] = {}  # by lease

    def make(self, tenant: str, size_bytes: int, nearest_bytes: int = SPARE_NOTHING) -> bool:
        """Evict until a tenant may use so much more; False, and nothing evicted, where that cannot be.

        Args:
            tenant: who asks.
            size_bytes: of the disk.
            nearest_bytes: spare what is needed as soon as that, or sooner.
        """
        if self._rows.account().missing(tenant, size_bytes) <= 0:
            return True
        self.sweep()
        account = self._rows.account()
        victims = self._choose(account, tenant, size_bytes, nearest_bytes)
        if account.missing(tenant, size_bytes) > 0:
            return False
        self._evict(victims)
        return True

    def keep_quotas(self) -> None:
        """Evict what is over the budget, or over what tenants may use, and held by nobody."""
        self.sweep()
        for tenant in self._rows.account().used_bytes:
            self._evict(self._choose(self._rows.account(), tenant, 0))

    def keep_budget(self) -> None:
        """Evict what is over the budget, last what tenants are guaranteed; what of that is not used is nobody's."""
        # Who had what is not always known after a restart: a maximum is kept from the next reservation on.
        guarantees = {name: replace(quota, maximum_bytes=None) for name, quota in self._rows.account().quotas.items()}
        for tenant in (NOBODY, *self._rows.account().used_bytes):
            account = replace(self._rows.account(), quotas=guarantees, is_cut=True)
            self._evict(self._choose(account, tenant, 0))

    def is_alive(self, owner: Owner) -> bool:
        """Return whether an owner has not ended, and its process lives."""
        if owner.clock_bytes is None or owner.name == NOBODY:
            return False
        lease_id = lease_of(owner.name)
        if lease_id not in self._living:
            self._living[lease_id] = is_held(self._files.leases, lease_id)
        return self._living[lease_id]

    def on_its_way(self, tenant: str, size_bytes: int) -> Digest | None:
        """Return an object that somebody fetches, and whose room might be a tenant's once it has come."""
        account = self._rows.account()
        if size_bytes > account.available(tenant):
            return None  # however much came
        for digest in self._rows.reserved():
            record = self._rows.get(digest)
            assert record is not None
            helps = account.helps(record.tenant, tenant, record.used_bytes, size_bytes)
            if helps and self._files.is_incoming_locked(digest):
                return digest
        return None

    def refusal(self, tenant: str, info: ObjectInfo) -> CacheFullError:
        """Return what to tell a tenant for whom there is no room."""
        account, budget = self._rows.account(), self._rows.configuration.budget_bytes
        cut = (
            f", of which the disk had room for {account.budget_bytes} (set it again once it has more)"
            if account.is_cut
            else ""
        )
        share = f"; tenant {tenant!r} may use {account.available(tenant)} of them" if account.quotas else ""
        missing = account.missing(tenant, footprint(info.size_bytes))
        return CacheFullError(
            f"no room for {info.size_bytes} bytes: the budget is {budget} bytes{cut}{share}; {account.total_bytes} "
            "are taken, and what could go is not enough: the rest is held by running jobs, on its way, pinned, or "
            f"guaranteed to other tenants; raise the budget by at most {missing} bytes, unpin something, or wait for "
            "a job to end"
        )

    def sweep(self) -> None:
        """Remove what goes before anything of use: bad files, and what fetches and owners left that are gone."""
        self._rows.lost_bytes = self._empty_quarantine()
        self._forget_readers()
        for digest in self._rows.reserved():
            record = self._rows.get(digest)
            assert record is not None
            if not self._files.is_incoming_locked(digest):
                self.forget(digest, record)
                self._files.remove_incoming(digest)
        for owner in self._rows.owners():
            if not self.is_alive(owner):
                self._rows.leave(owner.name)

    def forget(self, digest: Digest, record: ObjectRecord) -> None:
        """Remove an object, file and row."""
        self._files.object_path(digest).unlink(missing_ok=True)
        FileLink(self._files.folder, digest).remove()
        self._rows.delete(digest, record)

    def seize(self, digest: Digest) -> bool:
        """Make sure that nobody holds an object until `let_go`; False where somebody does."""
        if not self._holds.seize(digest):
            return False
        self._seized.append(digest)
        return True

    def let_go(self) -> None:
        """Let go of what was seized, once the transaction is through."""
        for digest in self._seized:
            self._holds.let_go(digest)

    def quarantine(self, digest: Digest, *, mapped: bool) -> None:
        """Put a bad file away until its room is needed, which is free only once nobody has it mapped."""
        path = self._files.object_path(digest)
        kept = self._files.quarantine / f"{digest}{_MAPPED if mapped else ''}"
        found_bytes = _footprint_of(path)
        if found_bytes:
            self._rows.lost_bytes += found_bytes - _footprint_of(kept)
            path.replace(kept)

    def quarantine_or_remove(self, digest: Digest, tenant: str) -> None:
        """Put away a bad file that its tenant fetches again, if there is room for both."""
        path = self._files.object_path(digest)
        if self._rows.account().missing(tenant, _footprint_of(path)) > 0:
            path.unlink(missing_ok=True)
        else:
            self.quarantine(digest, mapped=False)

    def count_quarantine(self, tenant: str) -> None:
        """Count a bad file that was moved by a process killed before it said so; it goes where its room is needed."""
        self._rows.lost_bytes = sum(map(_footprint_of, self._files.quarantine.iterdir()))
        if self._rows.account().missing(tenant, 0) > 0:
            self._rows.lost_bytes = self._empty_quarantine()

    def _choose(
        self, account: Account, tenant: str, size_bytes: int, nearest_bytes: int = SPARE_NOTHING
    ) -> Mapping[Digest, int]:
        """Return what to evict, bytes by digest, all of it seized."""
        victims = choose_victims(
            self._candidates(),
            account,
            tenant,
            size_bytes,
            nearest_bytes=nearest_bytes,
            take=lambda candidate: self.seize(candidate.digest),
        )
        return {victim.digest: victim.freed_bytes for victim in victims}

    def _candidates(self) -> Iterator[EvictionCandidate]:
        """Yield what may be evicted unless it is held, first what goes first."""
        living = []
        for owner in self._rows.owners():
            if self.is_alive(owner):
                living.append(self._queue(owner.name, owner.clock_bytes))
            else:
                yield from self._queue(owner.name, None)
        yield from by_distance(living)

    def _queue(self, owner: str, clock: int | None) -> Iterator[EvictionCandidate]:
        for next_use, digest, freed_bytes, tenant in self._rows.furthest(owner):
            yield EvictionCandidate(digest, freed_bytes, tenant, distance_bytes(next_use, clock))

    def _evict(self, victims: Mapping[Digest, int]) -> None:
        for digest in victims:
            record = self._rows.get(digest)
            assert record is not None
            self.forget(digest, record)
        self._rows.count({"evicted": len(victims), "evicted_bytes": sum(victims.values())})

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


def _footprint_of(path: Path) -> int:
    try:
        return footprint(path.lstat().st_size)
    except FileNotFoundError:
        return 0
