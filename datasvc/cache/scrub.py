"""Scrub: read every resident object again, and take out of use what has changed on the disk."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from datasvc.cache.catalogue.catalogue import JUDGED, MAPPED, EvictOutcome
from datasvc.cache.catalogue.file_links import FileLink
from datasvc.cache.catalogue.records import RESERVED
from datasvc.cache.process_handle import CacheFolder
from datasvc.repository import Digest
from datasvc.repository.objects.objects import digest_of_file

Finding = Literal["intact", "corrupt", "gone"]


@dataclass(frozen=True)
class ScrubReport:
    """What a scrub found.

    Attributes:
        num_checked: objects read.
        checked_bytes: of them.
        corrupt: bad ones; moved to the quarantine folder, and fetched again when they are wanted.
        held: those of the bad ones that jobs had mapped: what these read may have been wrong.
    """

    num_checked: int
    checked_bytes: int
    corrupt: tuple[Digest, ...]
    held: tuple[Digest, ...]


def scrub_folder(folder: CacheFolder, report: Callable[[int], None] | None = None) -> ScrubReport:
    """Read every resident object; see `Cache.scrub`."""
    num_checked, checked_bytes = 0, 0
    corrupt, held = [], []
    for digest, record in folder.catalogue.records().items():
        if record.state == RESERVED:
            continue
        found = _check(folder, digest)
        if found == "gone":
            continue
        corrupt += [digest] if found in {"corrupt", "mapped"} else []
        held += [digest] if found == "mapped" else []
        num_checked += 1
        checked_bytes += record.size_bytes
        if report is not None:
            report(record.size_bytes)
    return ScrubReport(num_checked, checked_bytes, tuple(corrupt), tuple(held))


def check_object(folder: CacheFolder, digest: Digest) -> Finding:
    """Read a resident object, and quarantine it if its bytes have changed."""
    found = _check(folder, digest)
    return "corrupt" if found == "mapped" else found


def _check(folder: CacheFolder, digest: Digest) -> Finding | Literal["mapped"]:
    """Check as `check_object` does; "mapped" is a corrupt one that somebody else holds."""
    path = folder.files.object_path(digest)
    try:
        link = path.lstat()
        if stat.S_ISLNK(link.st_mode):
            return _name_of(folder.catalogue.condemn(digest, link.st_ino))
        # Open until it is judged: as long as it is, no other file has its inode.
        with path.open("rb", buffering=0) as file:
            if _is_intact(folder, digest, file.fileno()):
                return "intact"
            return _name_of(folder.catalogue.condemn(digest, os.fstat(file.fileno()).st_ino))
    except FileNotFoundError:
        return "gone"


def _name_of(judged: EvictOutcome) -> Finding | Literal["mapped"]:
    # Where somebody else was faster it is judged, or fetched again.
    return "intact" if judged == JUDGED else "mapped" if judged == MAPPED else "corrupt"


def _is_intact(folder: CacheFolder, digest: Digest, descriptor: int) -> bool:
    # Held, so that it is not evicted while its own digest, if it is a staged file, is looked up and noted.
    folder.holds.acquire(digest)
    try:
        found = digest_of_file(Path(f"/proc/self/fd/{descriptor}"))
        intact = found == (FileLink(folder.files.folder, digest).content or digest)
        if intact:
            folder.catalogue.verified(digest)
        return intact
    finally:
        folder.holds.release(digest)
