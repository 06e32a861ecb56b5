"""Open a node's catalogue, or make it again from the files where it cannot be trusted.

The catalogue is written without fsync, so it is good for one boot of the machine only. After that, and where it is
damaged, a new one is filled by a scan of the folder: budget and quotas come from `cache.json`, pins from their files,
and each object is verified when it is wanted next. Nobody else may have the cache open meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import lmdb

from datasvc import durable
from datasvc.cache.catalogue.catalogue import Catalogue, describe_failure
from datasvc.cache.catalogue.configuration import Configuration
from datasvc.cache.catalogue.files import Files
from datasvc.cache.catalogue.lease import sweep, unlock_and_close
from datasvc.cache.catalogue.object_locks import Holds
from datasvc.cache.catalogue.pins import read_pins
from datasvc.errors import CorruptDataError

# lmdb.h, mdb.c: both meta pages lie at the start; mm_last_pg of MDB_meta is at 136.
_PAGE: Final = 4096
_LAST_PAGE: Final = struct.Struct("<Q")
_LAST_PAGE_OFFSET: Final = 136
_MAX_UNWRITTEN: Final = 2
_BOOT: Final = "boot"  # beside the database


def boot_id() -> str:
    """Return what names this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class Presence:
    """Says that this process has a cache open: a lock that all share, and that whoever rebuilds must have alone.

    Args:
        folder: of the cache.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder / "open.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)

    def is_alone(self) -> bool:
        """Return whether no other process has the cache open. Call it before `enter`, under the opening lock."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def enter(self) -> None:
        """Have the cache open from here on."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        """Have it open no longer."""
        os.close(self._descriptor)


def open_catalogue(files: Files, holds: Holds) -> tuple[Catalogue, Presence]:
    """Open the catalogue of a cache, made again where it cannot be trusted.

    Raises:
        ConfigError: the cache has a later format.
        CorruptDataError: the catalogue is damaged while other processes use it; or `cache.json` is.
        UnavailableError: it cannot be opened.
    """
    configuration = Configuration.read(files.folder) or Configuration()
    with _opening(files.folder):
        presence = Presence(files.folder)
        try:
            catalogue = _open(files, holds, presence, configuration)
            presence.enter()
        except BaseException:
            presence.close()
            raise
    return catalogue, presence


def _open(files: Files, holds: Holds, presence: Presence, configuration: Configuration) -> Catalogue:
    alone = presence.is_alone()
    if alone:
        sweep(files.leases)
        # Not even opened, if it is of another boot: LMDB dies of what a power cut may leave of it.
        if not _is_of_this_boot(files.catalogue) or _is_cut_short(files.catalogue):
            return _rebuild(files, holds, configuration)
    try:
        catalogue = Catalogue(files, holds)
        boot = catalogue.boot
        catalogue.check()
    except (
        lmdb.CorruptedError,
        lmdb.InvalidError,
        lmdb.VersionMismatchError,
        lmdb.PageNotFoundError,
        ValueError,
    ) as error:
        return _rebuild_alone(files, holds, configuration, alone=alone, why=str(error))
    except lmdb.Error as error:
        raise describe_failure(files.catalogue, error) from error
    if boot == boot_id():
        return catalogue
    catalogue.close()
    return _rebuild_alone(files, holds, configuration, alone=alone, why=f"it belongs to another boot, {boot!r}")


def _rebuild_alone(files: Files, holds: Holds, configuration: Configuration, *, alone: bool, why: str) -> Catalogue:
    if not alone:
        raise CorruptDataError(
            f"the cache catalogue {files.catalogue} is damaged ({why}) and other processes use it: stop these, then "
            "open the cache again; the catalogue is made anew from the files, nothing cached is lost"
        )
    return _rebuild(files, holds, configuration)


def _rebuild(files: Files, holds: Holds, configuration: Configuration) -> Catalogue:
    # The folders stay: another process that opens the cache knows it by them, and waits for this one.
    for folder in (files.catalogue, files.folder / "incoming", files.quarantine):
        for path in folder.iterdir():
            path.unlink()
    catalogue = Catalogue(files, holds)
    for name, pin in read_pins(files.pins).items():
        catalogue.pin(name, pin.objects)
    catalogue.rebuild(configuration, files.scan(), boot_id())
    # Last: a catalogue that was made half-way is made again.
    durable.write_file(files.catalogue / _BOOT, boot_id().encode(), synced=False)
    return catalogue


def _is_of_this_boot(folder: Path) -> bool:
    try:
        return (folder / _BOOT).read_bytes() == boot_id().encode()
    except FileNotFoundError:
        return False


def _is_cut_short(folder: Path) -> bool:
    """Return whether the database's file has lost its end: LMDB maps it, and would die of a bus error.

    Pages at the end that LMDB never wrote may be missing in a sound file; then these are added, empty.
    """
    path = folder / "data.mdb"
    if not path.exists():
        return False
    with path.open("r+b") as file:
        head = file.read(2 * _PAGE)
        if len(head) < 2 * _PAGE:
            return True
        last_page = max(_LAST_PAGE.unpack_from(head, page + _LAST_PAGE_OFFSET)[0] for page in (0, _PAGE))
        wanted, found = (last_page + 1) * _PAGE, path.stat().st_size
        if wanted > _MAX_UNWRITTEN * found:
            return True
        if wanted > found:
            file.truncate(wanted)
    return False


@contextmanager
def _opening(folder: Path) -> Iterator[None]:
    """Let one process at a time open the cache of a folder."""
    descriptor = os.open(folder / "opening.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        unlock_and_close(descriptor)
