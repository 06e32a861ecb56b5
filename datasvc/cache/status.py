"""Examine a cache: its status (`read_status`), and whether its objects are intact (`scrub_folder`).

A scrub also reads objects on which jobs have holds (locks against eviction). A job with a hold on a corrupt object
may have read wrong bytes, so the report has it in `held`.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from datasvc.cache.catalogue.catalogue import InvalidateOutcome
from datasvc.cache.catalogue.configuration import read_pins
from datasvc.cache.catalogue.files import FileLink
from datasvc.cache.catalogue.object_locks import RunningJob
from datasvc.cache.catalogue.records import RESERVED, footprint
from datasvc.cache.catalogue.tables import parse_objects
from datasvc.cache.process_handle import CacheFolder
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest
from datasvc.repository.objects.objects import digest_of_file

Finding = Literal["intact", "corrupt", "gone"]
"""Result of a check; "gone": the object is not resident."""


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


@dataclass(frozen=True)
class ScrubReport:
    """Result of a scrub.

    Attributes:
        corrupt: corrupt objects; they are moved to the quarantine, and fetched again at their next use.
        held: corrupt objects on which jobs had holds; these jobs may have read wrong bytes.
    """

    num_checked: int
    checked_bytes: int
    corrupt: tuple[Digest, ...]
    held: tuple[Digest, ...]


def scrub_folder(folder: CacheFolder, progress: Progress = NO_PROGRESS) -> ScrubReport:
    """Read every resident object; see `Cache.scrub`."""
    num_checked, checked_bytes = 0, 0
    corrupt, held = [], []
    # Reserved objects are verified at the end of their fetch.
    records = {digest: record for digest, record in folder.catalogue.objects().items() if record.state != RESERVED}
    progress.begin(sum(record.size_bytes for record in records.values()))
    for digest, record in records.items():
        finding = _check(folder, digest)
        if finding == "gone":
            continue
        if finding in {"corrupt", "held"}:
            corrupt.append(digest)
        if finding == "held":
            held.append(digest)
        num_checked += 1
        checked_bytes += record.size_bytes
        progress.advance(record.size_bytes)
    return ScrubReport(num_checked, checked_bytes, tuple(corrupt), tuple(held))


def check_object(folder: CacheFolder, digest: Digest) -> Finding:
    """Read one resident object, and quarantine it if its bytes have changed."""
    finding = _check(folder, digest)
    return "corrupt" if finding == "held" else finding


def _check(folder: CacheFolder, digest: Digest) -> Finding | Literal["held"]:
    """Like `check_object`, but return "held" for a corrupt object on which a job has a hold."""
    path = folder.files.object_path(digest)
    try:
        link = path.lstat()
        if stat.S_ISLNK(link.st_mode):  # a cache stores no links as objects, so this counts as corrupt
            return _finding_of(folder.catalogue.invalidate(digest, link.st_ino))
        # The file stays open until `invalidate` has compared its inode: the number of an open file is not reused.
        with path.open("rb", buffering=0) as file:
            if _is_intact(folder, digest, file.fileno()):
                return "intact"
            return _finding_of(folder.catalogue.invalidate(digest, os.fstat(file.fileno()).st_ino))
    except FileNotFoundError:
        return "gone"


def _finding_of(outcome: InvalidateOutcome) -> Finding | Literal["held"]:
    match outcome:
        case "superseded":
            # Another process has invalidated this file or fetched it again, so this check found nothing to report.
            return "intact"
        case "held":
            return "held"
        case "unused":
            return "corrupt"


def _is_intact(folder: CacheFolder, digest: Digest, descriptor: int) -> bool:
    # Hold the object, so that neither its file nor the recorded digest of a staged file is removed during the check.
    # The hold ends before `invalidate`, which reports whether others are left.
    folder.locks.acquire(digest)
    try:
        expected = FileLink(folder.files.folder, digest).content_digest or digest
        # Read the open file, because another process may have replaced the file at the object's path.
        intact = digest_of_file(Path(f"/proc/self/fd/{descriptor}")) == expected
        if intact:
            folder.catalogue.mark_verified(digest)
        return intact
    finally:
        folder.locks.release(digest)
