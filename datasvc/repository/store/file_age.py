"""How old a stored file is: what lets `gc` and running writers share a repository without talking to each other.

gc removes files that nothing names and that are old. A writer about to name an object that is there already makes it
young first. On local files both hold the object's lock while they look and act, so one of them always sees what the
other did: the writer finds the object gone and writes it again, or gc finds it young and leaves it.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

from datasvc.errors import ConfigError

# A remote object is made young by writing it again, so that is only done when it is older than this.
REWRITE_S: Final = 24 * 3600
# What stores call the time of the last change; memory knows when a file was made, which is as good: none changes.
_TIMES: Final = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


@dataclass(frozen=True)
class StoredFile:
    """A file of a store.

    Attributes:
        path: below the store's root.
        size_bytes: its size.
        modified_s: when it was written or made young last: seconds since 1970 by the store's clock.
    """

    path: str
    size_bytes: int
    modified_s: float


def modified_s(info: Mapping[str, Any], location: str) -> float:
    """Return when a file changed last, from what its store says of it; seconds since 1970.

    Raises:
        ConfigError: the store does not say.
    """
    found = next((info[name] for name in _TIMES if info.get(name) not in {None, ""}), None)
    if isinstance(found, str):
        found = datetime.fromisoformat(found)
    if isinstance(found, datetime) and found.tzinfo is None:
        found = found.replace(tzinfo=UTC)
    if found is None:
        raise ConfigError(f"the store does not say how old {location} is, so nothing can be removed by age there")
    return found.timestamp() if isinstance(found, datetime) else float(found)


def walk_local(root: Path, folder: str) -> Iterator[StoredFile]:
    """Yield the files below `root`/`folder`; those that vanish meanwhile are left out. Raises OSError."""
    try:
        names = os.listdir(root / folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        path = f"{folder}/{name}" if folder else name
        try:
            found = (root / path).lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(found.st_mode):
            continue  # what it leads to is not the repository's
        if stat.S_ISDIR(found.st_mode):
            yield from walk_local(root, path)
        else:
            yield StoredFile(path, found.st_size, found.st_mtime)


def refresh_local(path: Path, size_bytes: int) -> bool:
    """Make a file young; returns False where it is not there, of another size, or cannot be made young."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            found = os.fstat(file.fileno())
            # Without a name left, gc removed the file while this waited.
            if not found.st_nlink or found.st_size != size_bytes:
                return False
            os.utime(file.fileno())
            return True
    except OSError:
        # Another user's file, or no locks here: writing it again is always right.
        return False


def delete_local_if_older(path: Path, before_s: float) -> bool:
    """Delete a file that changed last before `before_s`; returns whether it did. Raises OSError."""
    try:
        file = _open(path)
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # a writer is making it young
        found, named = os.fstat(file.fileno()), _stat(path)
        if named is None or (named.st_dev, named.st_ino) != (found.st_dev, found.st_ino):
            return False  # replaced since it was opened: what has the name now is new
        if named.st_mtime >= before_s:
            return False
        path.unlink()
        return True


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("r+b")  # NFS wants a file open for writing before it locks it exclusively
    except PermissionError:
        return path.open("rb")


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
