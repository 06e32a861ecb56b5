"""Publish local files so that a crash at any instant leaves the old content or the new, never a mix.

The recipe: write a temporary file in the same folder, fsync it, rename (or link) it to its name, fsync the
folder. Nothing else in datasvc writes a local file in place. A process killed half-way leaves a file whose
name starts with `TEMPORARY_PREFIX`; readers never look at those.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY_PREFIX = ".tmp-"
_MAX_NAME_BYTES = 255  # of Linux's file systems
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h: start writing dirty pages, wait for nothing


def _find_sync_file_range() -> Any:
    try:
        call = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


_sync_file_range = _find_sync_file_range()


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Let the disk begin with what was just written, so that the fsync at the end finds little left to wait for.

    A hint: it makes nothing durable, and does nothing where the system has no such call.
    """
    if _sync_file_range is not None:
        _sync_file_range(descriptor, offset, length, _SYNC_FILE_RANGE_WRITE)


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create `folder` and its missing parents, durably. An existing folder is left as it is."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir()
    fsync_folder(folder.parent)


def is_plain_name(name: str) -> bool:
    """Return whether a name that comes from elsewhere may name a file in a folder of ours.

    It names nothing outside of the folder, and no file that starts with a dot, which is where our own files are:
    no slash, not empty, no control characters, at most 255 bytes of UTF-8.
    """
    if not name or name.startswith(".") or "/" in name:
        return False
    if any(unicodedata.category(character) in {"Cc", "Cs"} for character in name):
        return False
    return len(name.encode()) <= _MAX_NAME_BYTES


@contextmanager
def replacing(path: Path, *, synced: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file that becomes `path` when the block ends well, replacing what was there.

    Args:
        path: the file.
        synced: survive a power cut too. Without it a crash of the machine may leave a file of any content under
            the name; a killed process never does.

    Yields:
        A binary file open for writing, in the folder of `path`.

    Raises:
        OSError: writing, syncing or renaming failed; the temporary file is gone and `path` is as before, unless
            the last step failed, syncing the folder: then `path` is new, but may not survive a power cut.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            yield file
            if synced:
                file.flush()
                os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if not synced:
        return
    # Sync after the rename: a name must never outlive a power cut while a caller already relies on it.
    fsync_folder(path.parent)


def write_file(path: Path, content: bytes | memoryview, *, synced: bool = True) -> None:
    """Write `content` to `path`, replacing an old file atomically. Arguments and errors as of `replacing`."""
    with replacing(path, synced=synced) as file:
        file.write(content)


def create_file(path: Path, content: bytes | memoryview) -> None:
    """Write `content` to `path` only if nothing is there yet, atomically: of many racing writers one wins.

    Raises:
        FileExistsError: `path` exists; it was not touched.
        OSError: writing or linking failed and `path` does not exist; or syncing the folder failed, the last
            step: then it does, but may not survive a power cut.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # link() fails where rename() would replace: the file system decides the race.
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)
