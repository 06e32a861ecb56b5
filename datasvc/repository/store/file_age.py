"""Age of stored files, which lets `gc` and running writers share a repository without messages between them.

`gc` deletes old files that no entry references. A writer that is about to reference an existing object resets its age
first. For local files, both hold a lock on the file while they check and act: either the writer finds the file
deleted or locked, and writes it again, or `gc` finds the file young, locked or replaced, and keeps it.
"""

from __future__ import annotations

import fcntl
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

from datasvc.durable import TEMPORARY_PREFIX, fsync_folder
from datasvc.errors import ConfigError

# The age of a remote object can be reset only by writing it again. Writers do so only if its age exceeds this time.
REWRITE_S: Final = 24 * 3600
# Names of the modification time in the drivers. The memory driver has only a creation time, which is enough: it never
# modifies a file, but replaces it.
_TIMES: Final = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


@dataclass(frozen=True)
class StoredFile:
    """A file of a store, by its path below the root.

    `modified_s` is the time of the last write or age reset, in seconds since 1970, by the clock of the store.
    """

    path: str
    size_bytes: int
    modified_s: float


def modified_s(info: Mapping[str, Any], location: str) -> float:
    """Return the modification time of a file from fsspec's details, in seconds since 1970.

    Raises:
        ConfigError: the details have no modification time.
    """
    time = next((info[name] for name in _TIMES if info.get(name) not in {None, ""}), None)
    if isinstance(time, str):
        time = datetime.fromisoformat(time)
    if isinstance(time, datetime) and time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    if time is None:
        raise ConfigError(
            f"the store reports no modification time of {location}, so files there cannot be removed by age; use "
            "another store, or delete files by hand"
        )
    return time.timestamp() if isinstance(time, datetime) else float(time)


def walk_local(root: Path, folder: str) -> Iterator[StoredFile]:
    """Yield the files below `root`/`folder`, except those deleted in the meantime. Raise OSError on failure."""
    try:
        names = os.listdir(root / folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        path = f"{folder}/{name}" if folder else name
        try:
            status = (root / path).lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(status.st_mode):
            continue  # its target does not belong to the repository
        if stat.S_ISDIR(status.st_mode):
            yield from walk_local(root, path)
        else:
            yield StoredFile(path, status.st_size, status.st_mtime)


def refresh_local(path: Path, size_bytes: int) -> bool:
    """Reset the age of a file; return False if it does not exist, has another size, or its age cannot be reset."""
    try:
        with path.open("rb") as file:
            # Do not wait for the lock: any user who may read the file can hold it, for any time. If another process,
            # such as `gc`, holds it, the caller writes the file again.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            status = os.fstat(file.fileno())
            # If no link is left, `gc` has deleted the file before this thread locked it.
            if not status.st_nlink or status.st_size != size_bytes:
                return False
            os.utime(file.fileno())
            return True
    except OSError:
        # The file is locked, belongs to another user, or the file system has no locks: the caller writes it again.
        return False


def delete_local_if_older(path: Path, before_s: float) -> bool:
    """Delete a file if its last change was before `before_s`; return whether it was deleted. Raise OSError."""
    if before_s == math.inf:
        # Whatever its age is: no writer needs to be noticed. A run log deletes a part for nearly each that it writes.
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True
    try:
        file = _open(path)
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # a writer is resetting its age
        opened, current = os.fstat(file.fileno()), _stat(path)
        if current is None or (current.st_dev, current.st_ino) != (opened.st_dev, opened.st_ino):
            return False  # replaced since it was opened, so the file of this name is new
        if current.st_mtime >= before_s:
            return False
        return _delete_if_same(path, opened)


def _delete_if_same(path: Path, expected: os.stat_result) -> bool:
    """Delete a file unless another one has replaced it; return whether it was deleted. Raise OSError on failure."""
    # A writer that finds the file locked may replace it at any time, so `path` may be a new file by now. Rename the
    # file first: no writer uses the random name, so the file that is checked is also the file that is deleted.
    renamed = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    path.rename(renamed)
    current = renamed.stat()
    if (current.st_dev, current.st_ino) == (expected.st_dev, expected.st_ino):
        renamed.unlink()
        return True
    renamed.rename(path)
    fsync_folder(path.parent)  # the writer expects that a power cut does not lose the name
    return False


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("r+b")  # on NFS, an exclusive lock needs a file that is open for writing
    except PermissionError:
        return path.open("rb")


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
