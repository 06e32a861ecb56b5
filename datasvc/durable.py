"""Atomic, durable writes of local files: after a crash, a file has the old content or the new one, never a mix.

A write creates a temporary file in the same folder, syncs it, renames or links it to its final name, and syncs the
folder. A killed process may leave a temporary file. Its name starts with `TEMPORARY_PREFIX`, and readers ignore it.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

TEMPORARY_PREFIX = ".tmp-"
_MAX_NAME_BYTES = 255  # limit of Linux file systems
_MAX_REMOVALS = 3  # a file of a repository has at most three folders that `gc` may remove while they are empty
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h: start writeback of dirty pages, without waiting

_Result = TypeVar("_Result")


def _find_sync_file_range() -> Any:
    """Return `sync_file_range` of the C library, which Python does not offer; None if the library lacks it."""
    try:
        call = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


_sync_file_range = _find_sync_file_range()


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Start to write dirty pages to the disk, so that a later fsync takes less time.

    This is a hint: it makes nothing durable, and does nothing on systems without `sync_file_range`.
    """
    if _sync_file_range is not None:
        _sync_file_range(descriptor, offset, length, _SYNC_FILE_RANGE_WRITE)


def fsync_folder(folder: Path) -> None:
    """Sync a folder, so that the names in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create `folder` and its missing parents, so that they survive a power cut. Do nothing if `folder` exists."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for child in reversed(missing):
        with suppress(FileExistsError):  # another process may create the same folder now
            child.mkdir()
        fsync_folder(child.parent)


def retry_if_folder_vanishes(
    create: Callable[..., _Result], *arguments: Any, folder: Path | None = None, **options: Any
) -> _Result:
    """Make `folder` if it does not exist, and return the result of `create`, which makes a file in it.

    `gc` removes old folders that are empty, perhaps between these two steps: both are then done again. A folder that
    was just made is too young to be removed. Without `folder`, `create` makes it. Raises the errors of `create`.
    """
    for _ in range(_MAX_REMOVALS):
        with suppress(FileNotFoundError):
            if folder is not None:
                make_folder(folder)
            return create(*arguments, **options)
    if folder is not None:
        make_folder(folder)
    return create(*arguments, **options)


def is_plain_name(name: str) -> bool:
    """Return whether an untrusted name is safe as the name of a file in a folder of datasvc.

    A safe name has 1 to 255 bytes of UTF-8, no slash, no control characters, and no dot at its start, because a dot
    marks internal files.
    """
    if not name or name.startswith(".") or "/" in name:
        return False
    # Cc: control characters. Cs: surrogates, which UTF-8 cannot encode.
    if any(unicodedata.category(character) in {"Cc", "Cs"} for character in name):
        return False
    return len(name.encode()) <= _MAX_NAME_BYTES


def target_outside(folder: str | Path, path: str | Path) -> str | None:
    """Return the target of `path`, whose links are followed, if it is outside `folder`; None if it is inside.

    A folder from another person may have links to private files of the reader. A link of a snapshot in the cache
    of the Hugging Face Hub leads to `blobs` beside `snapshots`, so this folder counts as inside.
    """
    real, real_folder = os.path.realpath(path), os.path.realpath(folder)
    above, separator, _ = f"{real_folder}/".rpartition("/snapshots/")
    # `blobs` is not resolved: if it is a link itself, its target is outside.
    allowed = [real_folder, f"{above}/blobs"] if separator else [real_folder]
    is_inside = any(real == root or real.startswith(f"{root.rstrip('/')}/") for root in allowed)
    return None if is_inside else real


@contextmanager
def replacing(path: Path, *, synced: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block ends without an error.

    With `synced=False`, nothing is synced. If the machine then crashes, `path` may have any content. If only the
    process ends, `path` has the old content or the new one.

    Raises:
        OSError: a write, sync or rename failed; the temporary file is removed and `path` is unchanged. If only the
            sync of the folder failed, `path` has the new content, which may not survive a power cut.
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
    if synced:
        # Callers now rely on the new content, so a power cut must not undo the rename.
        fsync_folder(path.parent)


def write_file(path: Path, content: bytes | memoryview, *, synced: bool = True) -> None:
    """Write `content` to `path`, atomically replacing an existing file; for `synced` and errors, see `replacing`."""
    with replacing(path, synced=synced) as file:
        file.write(content)


def create_file(path: Path, content: bytes | memoryview) -> None:
    """Write `content` to `path` only if `path` does not exist, atomically: of concurrent writers, one succeeds.

    Raises:
        FileExistsError: `path` exists; it is unchanged.
        OSError: the write or the link failed, and `path` does not exist. If only the sync of the folder failed,
            `path` exists, but may not survive a power cut.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # Use link(), which fails if the name exists. rename() would replace the file of another writer.
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)
