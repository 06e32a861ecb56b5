"""Checks a folder of a cache or repository: file locks, free space and inodes.

The locks are tried as they are used: one holder, and another one that must be refused. Some network file systems
report success to both.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from datasvc.cache.catalogue.configuration import Configuration, check_folder, file_system_of
from datasvc.cache.catalogue.object_locks import ObjectLocks
from datasvc.doctor.finding import Finding
from datasvc.durable import TEMPORARY_PREFIX
from datasvc.errors import DatasvcError
from datasvc.repository.objects.objects import digest_of
from datasvc.sizes import format_size

_MIN_FREE: Final = 0.02  # share of the bytes or inodes of a disk, below which it counts as nearly full
_MOUNTS: Final = Path("/proc/self/mountinfo")
_LOCAL_DISK: Final = "put the cache on a local disk of this machine"
_REPOSITORY_LOCKS: Final = (
    "mount the file system with locks (NFS: version 4, or 3 without nolock), or use another one"
)


def examine_cache(folder: Path) -> Iterator[Finding]:
    """Yield findings on the folder of a cache. It may be missing: then on the folder above it, which has its disk."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if existing != folder:
        yield Finding("cache", "ok", f"{folder} does not exist yet; {existing} is checked instead")
    try:
        check_folder(existing)
        with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=existing) as folder_of_locks:
            yield examine_cache_locks(Path(folder_of_locks), existing)
        yield from _examine_budget(existing)
    except DatasvcError as error:
        yield Finding("cache", "problem", str(error))
    except OSError as error:
        yield Finding(
            "cache", "problem", f"{existing} cannot be written: {error}", "check its permissions and its disk"
        )
    yield from examine_space("cache", existing)


def examine_cache_locks(folder: Path, shown: Path) -> Finding:
    """Return whether holds and evictions exclude each other in `folder`, which is empty; `shown` is its name here."""
    locks = ObjectLocks(folder)
    try:
        digest = digest_of(b"")
        locks.acquire(digest)
        is_excluded = not locks.try_lock_exclusive(digest)
    finally:
        locks.close()
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        is_excluded = is_excluded and flock_excludes(Path(file.name))
    if is_excluded:
        return Finding("cache locks", "ok", f"file locks work in {shown}")
    return Finding("cache locks", "problem", f"two processes can hold one file lock in {shown}", _LOCAL_DISK)


def examine_repository_locks(file: Path, folder: Path) -> Finding:
    """Return whether writers and `gc` exclude each other; `file` is a temporary one in `folder`."""
    try:
        if flock_excludes(file):
            return Finding("repository locks", "ok", f"file locks work in {folder}")
    except OSError as error:
        return Finding("repository locks", "problem", f"{folder} has no file locks: {error}", _REPOSITORY_LOCKS)
    text = f"two processes can hold one file lock in {folder}"
    return Finding("repository locks", "problem", text, _REPOSITORY_LOCKS)


def flock_excludes(path: Path) -> bool:
    """Return whether a lock of a file refuses a second holder. Raises OSError."""
    with path.open("r+b") as first, path.open("r+b") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def examine_space(check: str, folder: Path) -> Iterator[Finding]:
    """Yield whether the disk of `folder` has free bytes and inodes for this user."""
    status = os.statvfs(folder)
    kind = file_system_of(folder, _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape"))
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"{format_size(free)} of {format_size(total)} free on the disk of {folder} ({kind})"
    yield _judge_space(f"{check} disk", free, total, text, "delete what is not needed, or use another disk")
    if status.f_files:  # some file systems make inodes as they are needed
        text = f"{status.f_favail:,} of {status.f_files:,} inodes free"
        yield _judge_space(
            f"{check} inodes", status.f_favail, status.f_files, text, "delete small files of this disk"
        )


def _judge_space(check: str, free: int, total: int, text: str, advice: str) -> Finding:
    if not free:
        return Finding(check, "problem", text, advice)
    if free < _MIN_FREE * total:
        return Finding(check, "warning", text, advice)
    return Finding(check, "ok", text)


def _examine_budget(folder: Path) -> Iterator[Finding]:
    """Yield whether the budget of a cache fits its disk, if it has one."""
    configuration = Configuration.read(folder)
    if configuration is None or not configuration.budget_bytes:
        return
    status = os.statvfs(folder)
    total = status.f_blocks * status.f_frsize
    text = f"the budget of the cache is {format_size(configuration.budget_bytes)}"
    if configuration.budget_bytes <= total:
        yield Finding("cache budget", "ok", text)
    else:
        text = f"{text}, and its disk has {format_size(total)} in all"
        yield Finding("cache budget", "problem", text, f"datasvc stage REF --cache {folder} --budget 80%")
