"""How full a cache is, and who uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from datasvc.cache.catalogue.catalogue import CacheJob
from datasvc.cache.catalogue.pins import read_pins
from datasvc.cache.catalogue.records import RESERVED, footprint
from datasvc.cache.process_handle import CacheFolder


@dataclass(frozen=True)
class TenantUsage:
    """What one tenant has. Bytes of the disk.

    Attributes:
        used_bytes: resident and on their way.
        guaranteed_bytes: its own in any case.
        maximum_bytes: its most; None: as much as there is.
    """

    used_bytes: int
    guaranteed_bytes: int
    maximum_bytes: int | None


@dataclass(frozen=True)
class CacheStatus:
    """What `datasvc cache status` prints. Bytes are those of the disk: whole blocks of 4 KiB.

    Attributes:
        folder: of the cache.
        budget_bytes: as it was set.
        limit_bytes: what of it the disk had room for.
        resident_bytes: of objects that are there.
        reserved_bytes: of objects on their way.
        quarantined_bytes: of bad ones that are kept until their room is needed.
        held_bytes: of resident objects that jobs have mapped.
        pinned_bytes: of resident objects that are pinned.
        num_resident: how many are there.
        pins: bytes by name of the pin, resident or not.
        tenants: by name.
        jobs: processes that have the cache open.
        counters: what was counted since the catalogue was made, by name.
    """

    folder: str
    budget_bytes: int
    limit_bytes: int
    resident_bytes: int
    reserved_bytes: int
    quarantined_bytes: int
    held_bytes: int
    pinned_bytes: int
    num_resident: int
    pins: Mapping[str, int]
    tenants: Mapping[str, TenantUsage]
    jobs: tuple[CacheJob, ...]
    counters: Mapping[str, int]

    @property
    def num_corrupt(self) -> int:
        """Bad objects found so far, on the way and on the disk."""
        return self.counters.get("corrupt", 0)


def read_status(folder: CacheFolder) -> CacheStatus:
    """Return how full a cache is; dead holders count as gone."""
    catalogue = folder.catalogue
    account, configuration, pinned = catalogue.account(), catalogue.configuration, catalogue.pinned()
    resident, reserved, held, kept, num_resident = 0, 0, 0, 0, 0
    for digest, record in catalogue.records().items():
        if record.state == RESERVED:
            reserved += record.used_bytes
            continue
        num_resident += 1
        resident += record.used_bytes
        held += record.used_bytes if folder.holds.is_held(digest) else 0
        kept += record.used_bytes if digest in pinned else 0
    return CacheStatus(
        folder=str(folder.files.folder),
        budget_bytes=configuration.budget_bytes,
        limit_bytes=account.budget_bytes,
        resident_bytes=resident,
        reserved_bytes=reserved,
        quarantined_bytes=account.lost_bytes,
        held_bytes=held,
        pinned_bytes=kept,
        num_resident=num_resident,
        pins={name: sum(map(footprint, pin.objects.values())) for name, pin in read_pins(folder.files.pins).items()},
        tenants={
            name: TenantUsage(
                account.used(name), account.quota(name).guaranteed_bytes, account.quota(name).maximum_bytes
            )
            for name in sorted({*account.used_bytes, *account.quotas})
        },
        jobs=tuple(catalogue.jobs()),
        counters=catalogue.counters(),
    )
