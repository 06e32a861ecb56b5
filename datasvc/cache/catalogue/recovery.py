"""Opens a node's catalogue, and rebuilds it from the files if it is damaged or from an earlier boot.

The catalogue is written without fsync, so it is valid for one boot of the machine only. After a reboot, or if it is
damaged, a scan of the folder fills a new one: budget and quotas come from `cache.json`, pins from their files, and
each object is verified before its next use. No other process may have the cache open during a rebuild. `CacheFolder`
calls `open_catalogue` once per process.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import lmdb

from datasvc import durable
from datasvc.cache.catalogue.catalogue import Catalogue
from datasvc.cache.catalogue.configuration import Configuration, read_pins
from datasvc.cache.catalogue.files import Files
from datasvc.cache.catalogue.object_locks import ObjectLocks, open_lock_file, sweep, unlock_and_close
from datasvc.cache.catalogue.tables import describe_failure
from datasvc.errors import CorruptDataError, UnavailableError

# lmdb.h, mdb.c: both meta pages are at the start of the file; mm_last_pg of MDB_meta is at offset 136.
_PAGE: Final = 4096
_LAST_PAGE: Final = struct.Struct("<Q")
_LAST_PAGE_OFFSET: Final = 136
# Ratio of expected to actual size above which a file counts as truncated. An intact file may also be shorter than
# expected, see `_is_truncated`.
_MAX_SIZE_RATIO: Final = 2
_BOOT: Final = "boot"  # a file beside the database
# Other processes wait for the lock during a rebuild. A rebuild of some million objects takes less time than this.
_MAX_WAIT_S: Final = 300.0
_RETRY_S: Final = 0.02


def boot_id() -> str:
    """Return the id of the current boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class OpenLock:
    """The lock of an open cache: every process that uses the cache has it shared; a rebuild needs it exclusively.

    Args:
        folder: folder of the cache.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "open.lock"
        self._descriptor = open_lock_file(self._path)

    def try_exclusive(self) -> bool:
        """Lock exclusively, and return True, if no other process has the cache open. Call it before `share`."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def share(self) -> None:
        """Take the shared lock until `close`; it replaces the exclusive one. Raises UnavailableError."""
        _lock_in_time(self._descriptor, fcntl.LOCK_SH, self._path)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


def open_catalogue(files: Files, locks: ObjectLocks) -> tuple[Catalogue, OpenLock]:
    """Open the catalogue of a cache; rebuild it if it is damaged or from an earlier boot.

    Raises:
        ConfigError: the cache has a later format.
        CorruptDataError: the catalogue is damaged and other processes use it, or `cache.json` is damaged.
        UnavailableError: the catalogue cannot be opened, or another process keeps the lock for too long.
    """
    configuration = Configuration.read(files.folder) or Configuration()
    with _opening(files.folder):
        open_lock = OpenLock(files.folder)
        try:
            catalogue = _open(files, locks, open_lock, configuration)
            open_lock.share()
        except BaseException:
            open_lock.close()
            raise
    return catalogue, open_lock


def _open(files: Files, locks: ObjectLocks, open_lock: OpenLock, configuration: Configuration) -> Catalogue:
    """Open the catalogue; rebuild it if needed, which only a process with the exclusive lock may do."""
    is_exclusive = open_lock.try_exclusive()
    if is_exclusive:
        # No other process has the cache open, and `_opening` keeps others out: no lease is being created now.
        sweep(files.leases)
        # Check before LMDB opens the file: LMDB can crash the process on a file that a power cut has damaged.
        if not _is_of_this_boot(files.catalogue) or _is_truncated(files.catalogue):
            return _rebuild(files, locks, configuration)
    try:
        catalogue = Catalogue(files, locks)
        try:
            boot = catalogue.check()
        except BaseException:
            catalogue.close()
            raise
    except (
        lmdb.CorruptedError,
        lmdb.InvalidError,
        lmdb.VersionMismatchError,
        lmdb.PageNotFoundError,
        ValueError,
    ) as error:
        why = str(error)
    except lmdb.Error as error:
        raise describe_failure(files.catalogue, error) from error
    else:
        if boot == boot_id():
            return catalogue
        catalogue.close()
        why = f"it belongs to another boot, {boot!r}"
    if not is_exclusive:
        raise CorruptDataError(
            f"the cache catalogue {files.catalogue} is damaged ({why}) and other processes use it: stop these, then "
            "open the cache again; it rebuilds the catalogue from the files, and no cached object is lost"
        )
    return _rebuild(files, locks, configuration)


def _rebuild(files: Files, locks: ObjectLocks, configuration: Configuration) -> Catalogue:
    """Return a new catalogue of the objects that are in the cache's folder."""
    # The folders themselves stay: without catalogue/, a process that opens the cache now might not recognise it.
    for folder in (files.catalogue, files.folder / "incoming", files.quarantine):
        for path in folder.iterdir():
            path.unlink()
    catalogue = Catalogue(files, locks)
    for name, pin in read_pins(files.pins).items():
        catalogue.pin(name, pin.objects)
    catalogue.rebuild(configuration, files.scan(), boot_id())
    # Written last: if the rebuild is interrupted, this file is missing, and the next process rebuilds again.
    durable.write_file(files.catalogue / _BOOT, boot_id().encode(), synced=False)
    return catalogue


def _is_of_this_boot(folder: Path) -> bool:
    try:
        return (folder / _BOOT).read_bytes() == boot_id().encode()
    except FileNotFoundError:
        return False


def _is_truncated(folder: Path) -> bool:
    """Return whether the database's file has lost its end: LMDB maps the file, and would crash with a bus error."""
    path = folder / "data.mdb"
    if not path.exists():
        return False
    with path.open("r+b") as file:
        head = file.read(2 * _PAGE)
        if len(head) < 2 * _PAGE:
            return True
        last_page = max(_LAST_PAGE.unpack_from(head, page + _LAST_PAGE_OFFSET)[0] for page in (0, _PAGE))
        # The two meta pages belong to the last two transactions, and either one may refer to pages in the lost end.
        expected_bytes, file_bytes = (last_page + 1) * _PAGE, path.stat().st_size
        if expected_bytes > _MAX_SIZE_RATIO * file_bytes:
            return True
        if expected_bytes > file_bytes:
            # The file is intact: LMDB has never written some pages at its end.
            file.truncate(expected_bytes)
    return False


@contextmanager
def _opening(folder: Path) -> Iterator[None]:
    """Lock a cache folder inside the block, so that one process at a time opens it."""
    path = folder / "opening.lock"
    descriptor = open_lock_file(path)
    try:
        _lock_in_time(descriptor, fcntl.LOCK_EX, path)
        yield
    finally:
        unlock_and_close(descriptor)


def _lock_in_time(descriptor: int, kind: int, path: Path) -> None:
    """Lock a file, and wait for other processes up to `_MAX_WAIT_S`. Raises UnavailableError after that time."""
    deadline = time.monotonic() + _MAX_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            # Try again after a pause, because a waiting flock has no time limit.
            if time.monotonic() >= deadline:
                raise UnavailableError(
                    f"another process has locked {path} for more than {_MAX_WAIT_S:g} s, so this cache cannot be "
                    f"opened; find the process with `fuser {path}`, and end it if it is not opening the cache"
                ) from error
            time.sleep(_RETRY_S)
        else:
            return
