"""Files of a cache folder, and the locks of objects that are being fetched.

CACHE/cache.json            budget and quotas, see `configuration`
CACHE/objects/3f/3fa9...    resident objects, named by digest
CACHE/incoming/3fa9...      an object that is being fetched, locked by the fetching thread
CACHE/incoming/*.parts      list of its received parts, see `origin_source`
CACHE/quarantine/3fa9...    objects whose bytes have changed, kept until their space is needed
CACHE/pins/                 pins, see `configuration`
CACHE/holds/                locks of objects in use, see `object_locks`
CACHE/leases/               one locked file per process, see `object_locks`
CACHE/catalogue/            LMDB database, see `catalogue` and `recovery`
CACHE/links/                staged files under their original names, see `staged_files`

Only the cache's user can open the files that processes lock, see `object_locks`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple

from datasvc import durable
from datasvc.cache.catalogue.configuration import check_folder
from datasvc.cache.catalogue.object_locks import PRIVATE_FOLDER, is_locked, make_private, unlock_and_close
from datasvc.cache.catalogue.quotas import DEFAULT_TENANT
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.repository import Digest
from datasvc.repository.objects.objects import parse_digest

DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a disk without space, or without inodes for new files."""
PARTS_SUFFIX = ".parts"
_TENANT: Final = "user.datasvc.tenant"  # extended attribute of an object's file; it outlives the catalogue


_CONTENT: Final = ".content"


class ScannedFile(NamedTuple):
    """A file that a scan found in the folder of resident objects.

    Attributes:
        digest: digest in its name; the content is not verified.
        tenant: tenant that fetched it; the default tenant if the file system stores no extended attributes.
    """

    digest: Digest
    size_bytes: int
    tenant: str


class Files:
    """The files of one cache folder; missing folders are created.

    Raises:
        ConfigError: the folder cannot be created or written, or `check_folder` refuses it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._root = str(folder)  # a string: thousands of paths are built per second, and a `Path` takes longer
        self.leases = folder / "leases"
        self.catalogue = folder / "catalogue"
        self.quarantine = folder / "quarantine"
        self.pins = folder / "pins"
        # Locked incoming files by object and thread id. Not descriptors: if an interrupt comes before a `FileIO` is
        # stored here, the deletion of the `FileIO` closes the file.
        self._locked: dict[tuple[Digest, int], FileIO] = {}
        try:
            folder.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
            check_folder(folder)
            # catalogue/ comes before objects/, so that `check_folder` can tell a new cache from another folder.
            for name in ("leases", "catalogue", "quarantine", "pins"):
                make_private(folder / name)
            # Not private: no process locks resident objects, so other users may read them if the cache's folder is
            # open to them.
            (folder / "objects").mkdir(exist_ok=True)
            make_private(folder / "incoming")
        except OSError as error:
            raise ConfigError(
                f"cannot use {folder} as a cache: {error}; choose a folder on a local disk that this user can write"
            ) from error

    def object_path(self, digest: Digest) -> Path:
        """Return the path of a resident object."""
        return Path(self.object_name(digest))

    def object_name(self, digest: Digest) -> str:
        """Return the path of a resident object as text: creating a `Path` takes longer than opening a file."""
        return f"{self._root}/objects/{digest[:2]}/{parse_digest(digest)}"

    def has_inodes(self) -> bool:
        """Return whether the disk has an inode for another file; True if its file system does not count inodes."""
        disk = os.statvfs(self._root)
        return not disk.f_files or disk.f_favail > 0

    def is_there(self, digest: Digest, size_bytes: int) -> bool:
        """Return whether a resident object's file exists with the right size, and is not a link."""
        try:
            status = os.lstat(self.object_name(digest))
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == size_bytes

    def inode(self, digest: Digest) -> int | None:
        """Return the inode of a resident object's file; None if the file is missing."""
        try:
            return os.lstat(self.object_name(digest)).st_ino
        except FileNotFoundError:
            return None

    def parts_path(self, digest: Digest) -> Path:
        """Return the path of the list of received parts of an incoming object."""
        return Path(self._incoming(digest) + PARTS_SUFFIX)

    def lock_incoming(self, digest: Digest) -> bool:
        """Lock the incoming file of an object until `unlock`; bytes that an ended process has written are kept.

        Return False if another thread or process has the lock, perhaps a caller of `wait_for_incoming`. Call this
        method only inside a write transaction of the catalogue, so that an object has one incoming file.
        Raises OSError.
        """
        # Create the target folder here, not in `publish`: if the disk has no inodes, the caller evicts an object.
        with suppress(FileExistsError):
            os.mkdir(f"{self._root}/objects/{digest[:2]}")
        file = FileIO(self._incoming(digest), "r+", opener=_open_or_create)
        try:
            # Without waiting: the write transaction of the caller blocks the transactions of all other processes.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._locked[digest, threading.get_ident()] = file
        return True

    def is_incoming_locked(self, digest: Digest) -> bool:
        """Return whether a running process or thread fetches the object."""
        return is_locked(self._incoming(digest))

    def wait_for_incoming(self, digest: Digest) -> None:
        """Wait until the fetch of an object has ended: the kernel then releases its lock, also after a crash.

        If the object is not being fetched, wait until other callers of this method have released their locks, because
        `lock_incoming` fails until then.
        """
        try:
            descriptor = os.open(self._incoming(digest), os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # The shared lock was free, so no fetch is in progress. The exclusive lock waits for the other callers.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BlockingIOError:
            # A fetch has the exclusive lock. A shared lock lets all waiting callers continue together.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        finally:
            unlock_and_close(descriptor)

    def is_locked_by_this_thread(self, digest: Digest) -> bool:
        """Return whether the calling thread has the lock of the object's incoming file."""
        return (digest, threading.get_ident()) in self._locked

    def is_fetching_in_this_thread(self) -> bool:
        """Return whether the calling thread has the lock of any incoming file."""
        thread = threading.get_ident()
        return any(holder == thread for _, holder in tuple(self._locked))

    def incoming(self, digest: Digest) -> int:
        """Return the descriptor of the incoming file that this thread has locked."""
        return self._locked[digest, threading.get_ident()].fileno()

    def publish(self, digest: Digest, tenant: str = DEFAULT_TENANT) -> None:
        """Rename a complete, verified incoming file to its final name; `unlock` releases its lock. Raises OSError."""
        target = self.object_name(digest)
        if tenant != DEFAULT_TENANT:
            with suppress(OSError):  # not every file system supports extended attributes
                os.setxattr(self._incoming(digest), _TENANT, tenant.encode())
        # No fsync: after a crash of the machine the object is verified again before it is used.
        os.rename(self._incoming(digest), target)
        _unlink(self._incoming(digest) + PARTS_SUFFIX)

    def unlock(self, digest: Digest) -> None:
        """Release this thread's lock of the incoming file; threads and processes that wait for it continue."""
        file = self._locked.pop((digest, threading.get_ident()))
        fcntl.flock(file, fcntl.LOCK_UN)  # closing does not unlock while a forked child has a copy
        file.close()

    def abandon(self) -> None:
        """Close the descriptors that a forked child has inherited; the locks stay with the parent."""
        for file in self._locked.values():
            file.close()
        self._locked.clear()

    def remove_incoming(self, digest: Digest) -> None:
        """Remove the incoming file of an object. Call it only inside a write transaction of the catalogue."""
        _unlink(self._incoming(digest))
        _unlink(self._incoming(digest) + PARTS_SUFFIX)

    def _incoming(self, digest: Digest) -> str:
        """Return the path of the incoming file of an object."""
        return f"{self._root}/incoming/{parse_digest(digest)}"

    def scan(self) -> list[ScannedFile]:
        """Return every object file in the folder of resident objects. Raises OSError."""
        scanned = []
        for folder in sorted(path for path in (self.folder / "objects").iterdir() if path.is_dir()):
            with os.scandir(folder) as entries:
                objects = [entry for entry in entries if _is_object(entry, folder.name)]
                scanned += [
                    ScannedFile(Digest(entry.name), entry.stat().st_size, _tenant_of(entry.path)) for entry in objects
                ]
        return scanned


def _open_or_create(path: str, flags: int) -> int:
    # Readable by other users: the file becomes the resident object. Until then, the private folder protects it.
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


# A staged file is a remote file that was fetched by its URL, see `staged_files`. Its object is not named by the
# digest of its content, so a scrub or a restart verifies the object by the recorded digest.


class FileLink:
    """The link of one staged file.

    CACHE/links/3fa9.../.content     digest of the content
    CACHE/links/3fa9.../model.bin    symbolic link to the object

    Args:
        folder: folder of the cache.
        digest: name of the file's object, which is not the digest of its content.
    """

    def __init__(self, folder: Path, digest: Digest) -> None:
        self._folder = folder / "links" / parse_digest(digest)
        self._target = Path("..", "..", "objects", digest[:2], digest)

    @property
    def content_digest(self) -> Digest | None:
        """Digest of the content when it arrived; None if the object is not a staged file.

        Also None if the recorded digest is damaged: the object then counts as corrupt, and is fetched again.
        """
        path = self._folder / _CONTENT
        # An earlier version of datasvc created a symbolic link of this name for a staged file called ".content".
        with suppress(FileNotFoundError, UnicodeDecodeError, CorruptDataError):
            return None if path.is_symlink() else parse_digest(path.read_text(encoding="ascii"))
        return None

    def record_content(self, content_digest: Digest) -> None:
        """Record the digest of the content. Raises OSError."""
        durable.make_folder(self._folder)
        durable.write_file(self._folder / _CONTENT, content_digest.encode())

    def make(self, name: str) -> Path:
        """Create the link if it is missing, and return its path. No existing file is ever replaced.

        Raises:
            ConfigError: `name` is not a plain file name, or another file has it.
            OSError: the link cannot be created.
        """
        path = self._folder / name
        if not durable.is_plain_name(name):
            raise ConfigError(
                f"cannot link the staged file as {name[:80]!r} in {self._folder}: this is not a plain file name; "
                "copy the file to a name of 1 to 255 bytes without a leading dot, slash or control characters"
            )
        try:
            os.symlink(self._target, path)
        except FileExistsError:
            # Another process may have created the same link a moment ago.
            if not (path.is_symlink() and path.readlink() == self._target):
                raise ConfigError(
                    f"cannot link the staged file as {path}: expected a link to {self._target} or nothing, found "
                    "another file; remove it, then stage the file again"
                ) from None
        return path

    def remove(self) -> None:
        """Remove the link and the recorded digest."""
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                path.unlink(missing_ok=True)
            self._folder.rmdir()
