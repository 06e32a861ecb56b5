"""Folders and lock files of a cache that only its own user can open.

A user who may open a file for reading may also lock it for any time, and so stop every process of a cache. Therefore
three kinds of paths are closed to other users: new cache folders, lock files, and folders of files that are locked.
The owner may open the cache's folder by `chmod`. Then others can read resident objects, but not open the other two.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

PRIVATE_FOLDER: Final = 0o700
PRIVATE_FILE: Final = 0o600
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def make_private(folder: Path) -> None:
    """Create a folder, unless it exists, and close it to other users. Raises OSError."""
    folder.mkdir(PRIVATE_FOLDER, exist_ok=True)
    if folder.stat().st_mode & _OTHERS:  # an earlier version has created it
        with suppress(PermissionError):  # some file systems have one mode for all files
            folder.chmod(PRIVATE_FOLDER)


def open_lock_file(path: Path) -> int:
    """Open a lock file, which is created if missing, and close it to other users. Raises OSError."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, PRIVATE_FILE)
    if os.fstat(descriptor).st_mode & _OTHERS:
        with suppress(PermissionError):  # see `make_private`
            os.fchmod(descriptor, PRIVATE_FILE)
    return descriptor
