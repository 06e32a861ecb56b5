"""Status of a cache: disk space in use, tenants, pins, jobs and counters.

`datasvc cache status`, `datasvc top` and the `/status` of a node show it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from datasvc.cache.catalogue.lease import RunningJob
from datasvc.cache.catalogue.pins import read_pins
from datasvc.cache.catalogue.records import RESERVED, footprint
from datasvc.cache.catalogue.tables import parse_objects
from datasvc.cache.process_handle import CacheFolder


@dataclass(frozen=True)
class TenantUsage:
    """Disk space of one tenant.

    Attributes:
        used_bytes: bytes of resident objects and of those being fetched.
        guaranteed_bytes: bytes reserved for the tenant.
        maximum_bytes: limit of the bytes that it may use; None: only the budget limits it.
    """

    used_bytes: int
    guaranteed_bytes: int
    maximum_bytes: int | None


@dataclass(frozen=True)
class CacheStatus:
    """The values that `datasvc cache status` prints. Sizes are disk space, in whole blocks of 4 KiB.

    Attributes:
        budget_bytes: budget as it was set.
        limit_bytes: the budget, or a lower limit that was set when the disk was full.
        resident_bytes: bytes of resident objects.
        reserved_bytes: bytes of objects being fetched.
        quarantined_bytes: bytes of corrupt objects that are kept until their space is needed.
        held_bytes: bytes of resident objects that jobs use.
        pinned_bytes: bytes of resident objects that are pinned.
        disk_bytes: size of the disk of the cache.
        free_disk_bytes: bytes of that disk that this user can still write, for whatever files.
        pins: bytes of the objects of each pin, resident or not, by name of the pin.
        tenants: usage by tenant.
        jobs: running jobs that have the cache open.
        counters: numbers of events and bytes since the catalogue was created, by name.
    """

    folder: str
    budget_bytes: int
    limit_bytes: int
    resident_bytes: int
    reserved_bytes: int
    quarantined_bytes: int
    held_bytes: int
    pinned_bytes: int
    disk_bytes: int
    free_disk_bytes: int
    num_resident: int
    pins: Mapping[str, int]
    tenants: Mapping[str, TenantUsage]
    jobs: tuple[RunningJob, ...]
    counters: Mapping[str, int]

    @property
    def num_corrupt(self) -> int:
        """Number of corrupt objects found so far, in transfer and on the disk."""
        return self.counters.get("corrupt", 0)


def read_status(folder: CacheFolder) -> CacheStatus:
    """Return the status of a cache; jobs of ended processes are not included."""
    # Read in one transaction, so that the numbers belong to the same moment. Holds, pins and jobs are read later.
    account, configuration, pinned, rows, counters = folder.catalogue.read(
        lambda tables: (
            tables.account(),
            tables.configuration,
            tables.pinned(),
            tables.object_rows(),
            tables.counters(),
        )
    )
    resident_bytes, reserved_bytes, held_bytes, pinned_bytes, num_resident = 0, 0, 0, 0, 0
    for digest, record in parse_objects(rows).items():
        if record.state == RESERVED:
            reserved_bytes += record.used_bytes
            continue
        num_resident += 1
        resident_bytes += record.used_bytes
        held_bytes += record.used_bytes if folder.locks.is_held(digest) else 0
        pinned_bytes += record.used_bytes if digest in pinned else 0
    disk = shutil.disk_usage(folder.files.folder)
    return CacheStatus(
        folder=str(folder.files.folder),
        budget_bytes=configuration.budget_bytes,
        limit_bytes=account.budget_bytes,  # an account has the present limit as its budget
        resident_bytes=resident_bytes,
        reserved_bytes=reserved_bytes,
        quarantined_bytes=account.quarantined_bytes,
        held_bytes=held_bytes,
        pinned_bytes=pinned_bytes,
        disk_bytes=disk.total,
        free_disk_bytes=disk.free,
        num_resident=num_resident,
        pins={name: sum(map(footprint, pin.objects.values())) for name, pin in read_pins(folder.files.pins).items()},
        tenants={
            name: TenantUsage(
                account.used(name), account.quota(name).guaranteed_bytes, account.quota(name).maximum_bytes
            )
            for name in sorted({*account.used_bytes, *account.quotas})
        },
        jobs=tuple(folder.catalogue.jobs()),
        counters=counters,
    )
