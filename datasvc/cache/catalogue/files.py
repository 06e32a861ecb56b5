"""Where a cache keeps its files, and the lock of an object that is on its way.

CACHE/cache.json            budget and quotas, see `configuration`
CACHE/objects/3f/3fa9...    resident objects, named by digest
CACHE/incoming/3fa9...      an object on its way, locked by whoever fetches it; .parts: which parts are there
CACHE/quarantine/3fa9...    objects whose bytes were found changed, until their room is needed
CACHE/pins/                 what shall stay, see `pins`
CACHE/holds/                locks of what is mapped, see `holds`
CACHE/leases/               one locked file per process, see `lease`
CACHE/catalogue/            LMDB, see `catalogue` and `recovery`
CACHE/links/                staged files under their own names, see `staged_files`
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple

from datasvc.cache.catalogue.configuration import check_folder
from datasvc.cache.catalogue.lease import is_locked, unlock_and_close
from datasvc.cache.catalogue.quotas import DEFAULT_TENANT
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.repository import Digest
from datasvc.repository.objects.objects import parse_digest

PARTS_SUFFIX = ".parts"
_TENANT: Final = "user.datasvc.tenant"  # an extended attribute: it outlives the catalogue


class ScannedFiles(NamedTuple):
    """What a scan found where resident objects lie.

    Attributes:
        digest: its name.
        size_bytes: of the file.
        tenant: who brought it here; the default one where the file system does not say.
    """

    digest: Digest
    size_bytes: int
    tenant: str


class Files:
    """The files of one cache folder, made where missing.

    Args:
        folder: the cache's folder.

    Raises:
        ConfigError: the folder cannot be made or written, or is no place for a cache.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._root = str(folder)  # paths are strings where there are thousands in a second
        self.leases = folder / "leases"
        self.catalogue = folder / "catalogue"
        self.quarantine = folder / "quarantine"
        self.pins = folder / "pins"
        # By object and thread. An interrupt drops a file that has not got here, or is here no more: that closes it.
        self._locked: dict[tuple[Digest, int], FileIO] = {}
        needed = (self.leases, self.catalogue, self.quarantine, self.pins, folder / "objects", folder / "incoming")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            check_folder(folder)
            for each in needed:
                each.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot use {folder} as a cache: {error}") from error

    def object_path(self, digest: Digest) -> Path:
        """Return where a resident object lies."""
        return Path(self.object_name(digest))

    def object_name(self, digest: Digest) -> str:
        """Return where a resident object lies, as text: a `Path` takes longer to make than a file to open."""
        return f"{self._root}/objects/{digest[:2]}/{parse_digest(digest)}"

    def is_there(self, digest: Digest, size_bytes: int) -> bool:
        """Return whether a resident object's file is there, and whole: a link is not it, whatever it leads to."""
        try:
            found = os.lstat(self.object_name(digest))
        except FileNotFoundError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == size_bytes

    def inode(self, digest: Digest) -> int | None:
        """Return the inode of a resident object's file; None where there is none."""
        try:
            return os.lstat(self.object_name(digest)).st_ino
        except FileNotFoundError:
            return None

    def incoming_path(self, digest: Digest) -> Path:
        """Return where an object grows while it is fetched."""
        return Path(self._incoming(digest))

    def parts_path(self, digest: Digest) -> Path:
        """Return the file that says which parts of an incoming object are there."""
        return Path(self._incoming(digest) + PARTS_SUFFIX)

    def lock_incoming(self, digest: Digest) -> bool:
        """Take the incoming file of an object, locked until `unlock`; what a dead process left in it stays.

        Call it in a write transaction of the catalogue only, so that there is never more than one. It does not wait:
        False where somebody looks at the lock just then, see `wait_for_incoming`. Raises OSError.
        """
        file = FileIO(self._incoming(digest), "r+", opener=_open_or_create)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._locked[digest, threading.get_ident()] = file
        return True

    def is_incoming_locked(self, digest: Digest) -> bool:
        """Return whether a living process or thread fetches the object."""
        return is_locked(self._incoming(digest))

    def wait_for_incoming(self, digest: Digest) -> None:
        """Return once whoever fetches the object has finished, failed or died: the kernel frees its lock then.

        Where nobody fetches it, return once nobody waits for it any more.
        """
        try:
            descriptor = os.open(self._incoming(digest), os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BlockingIOError:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        finally:
            unlock_and_close(descriptor)

    def is_locked_by_this_thread(self, digest: Digest) -> bool:
        """Return whether the calling thread has the lock."""
        return (digest, threading.get_ident()) in self._locked

    def is_fetching_in_this_thread(self) -> bool:
        """Return whether the calling thread has the lock of any object."""
        thread = threading.get_ident()
        return any(owner == thread for _, owner in tuple(self._locked))

    def incoming(self, digest: Digest) -> int:
        """Return the descriptor of the locked file that this thread fetches into."""
        return self._locked[digest, threading.get_ident()].fileno()

    def publish(self, digest: Digest, tenant: str = DEFAULT_TENANT) -> None:
        """Give a complete, verified incoming file its name; the lock stays until `unlock`. Raises OSError."""
        target = self.object_name(digest)
        if tenant != DEFAULT_TENANT:
            with suppress(OSError):  # not every file system has such attributes
                os.setxattr(self._incoming(digest), _TENANT, tenant.encode())
        # No fsync: after a crash of the machine the object is verified again before it is used.
        try:
            os.rename(self._incoming(digest), target)
        except FileNotFoundError:
            Path(target).parent.mkdir(exist_ok=True)
            os.rename(self._incoming(digest), target)
        _unlink(self._incoming(digest) + PARTS_SUFFIX)

    def unlock(self, digest: Digest) -> None:
        """Free this thread's lock, and with it whoever waits for the object."""
        file = self._locked.pop((digest, threading.get_ident()))
        fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may have a copy, for which closing is not enough
        file.close()

    def abandon(self) -> None:
        """Close the copies of descriptors that a forked child has: the locks are the parent's."""
        for file in self._locked.values():
            file.close()
        self._locked.clear()

    def remove_incoming(self, digest: Digest) -> None:
        """Remove what has arrived of an object. Call it in a write transaction of the catalogue only."""
        _unlink(self._incoming(digest))
        _unlink(self._incoming(digest) + PARTS_SUFFIX)

    def _incoming(self, digest: Digest) -> str:
        return f"{self._root}/incoming/{parse_digest(digest)}"

    def scan(self) -> list[ScannedFiles]:
        """Return every file that lies where resident objects lie. Raises OSError."""
        found = []
        for folder in sorted(path for path in (self.folder / "objects").iterdir() if path.is_dir()):
            with os.scandir(folder) as entries:
                inside = [entry for entry in entries if _is_object(entry, folder.name)]
                found += [
                    ScannedFiles(Digest(entry.name), entry.stat().st_size, _tenant_of(entry.path)) for entry in inside
                ]
        return found


def _open_or_create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o644)


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _tenant_of(path: str) -> str:
    try:
        return os.getxattr(path, _TENANT).decode()
    except (OSError, ValueError):
        return DEFAULT_TENANT


def _is_object(entry: os.DirEntry[str], prefix: str) -> bool:
    try:
        return parse_digest(entry.name)[:2] == prefix and entry.is_file(follow_symlinks=False)
    except CorruptDataError:
        return False
