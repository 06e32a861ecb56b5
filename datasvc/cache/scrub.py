"""Scrub: read every resident object again, and take out of use what has changed on the disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from datasvc.cache.file_links import FileLink
from datasvc.cache.folder import CacheFolder
from datasvc.cache.records import RESERVED
from datasvc.repository import Digest
from datasvc.repository.objects import digest_of_file

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
        is_held = folder.holds.is_held(digest)
        found = check_object(folder, digest)
        if found == "gone":
            continue
        if found == "corrupt":
            corrupt.append(digest)
            held += [digest] if is_held else []
        num_checked += 1
        checked_bytes += record.size_bytes
        if report is not None:
            report(record.size_bytes)
    return ScrubReport(num_checked, checked_bytes, tuple(corrupt), tuple(held))


def check_object(folder: CacheFolder, digest: Digest) -> Finding:
    """Read a resident object, and quarantine it if its bytes have changed."""
    is_held = folder.holds.is_held(digest)
    # Evicted meanwhile it would look damaged, or be another file by the time it is judged.
    folder.holds.acquire(digest)
    try:
        found = digest_of_file(folder.files.object_path(digest))
        if found == (FileLink(folder.files.folder, digest).content or digest):
            folder.catalogue.verified(digest)
            return "intact"
        # Where somebody else was faster it is judged, or fetched again.
        return "corrupt" if folder.catalogue.quarantine(digest, reserved=False, mapped=is_held) else "intact"
    except FileNotFoundError:
        return "gone"
    finally:
        folder.holds.release(digest)
