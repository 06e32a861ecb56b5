"""Scrub a cache: read every resident object, and quarantine those whose bytes have changed on the disk.

`Cache.scrub` checks all objects, and `Cache.check` one. Objects on which jobs have holds (locks against eviction) are
checked too. A job with a hold on a corrupt object may have read wrong bytes, so the report has it in `held`.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from datasvc.cache.catalogue.catalogue import InvalidateOutcome
from datasvc.cache.catalogue.file_links import FileLink
from datasvc.cache.catalogue.records import RESERVED
from datasvc.cache.process_handle import CacheFolder
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.repository import Digest
from datasvc.repository.objects.objects import digest_of_file

Finding = Literal["intact", "corrupt", "gone"]
"""Result of a check; "gone": the object is not resident."""


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
