"""Object locks: each process locks the objects that it uses; the kernel releases the locks when the process exits.

Each object has a lock of one byte, at an offset computed from its digest, in one of 64 files. A process that uses an
object has a hold on it: a shared lock. A hold writes nothing to disk, and needs no clean-up and no timeout. An
eviction takes the lock exclusively, which fails while any process has a hold. The locks belong to the open file
description (`F_OFD_SETLK`): if one process opens a file twice, locks through the two descriptors exclude each other
like locks of two processes. Evictions use descriptors of their own, so that a process never evicts an object on which
it has a hold.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import struct
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from datasvc.durable import TEMPORARY_PREFIX
from datasvc.errors import ConfigError, UnavailableError
from datasvc.repository import Digest

# The kernel searches the locks of a file linearly. Several files keep each list of locks short.
_NUM_FILES: Final = 64
_FLOCK: Final = struct.Struct("@hhqqi4x")  # fcntl.h: type, whence, start, len, pid
_GETLK: Final = 36  # fcntl.h: F_OFD_GETLK
SETLK: Final = 37
"""F_OFD_SETLK of fcntl.h: lock or unlock bytes, without waiting."""
SETLKW: Final = 38
"""F_OFD_SETLKW of fcntl.h: lock bytes, and wait for other open files."""
_TOO_MANY_FILES: Final = (errno.EMFILE, errno.ENFILE)
# Errors of file systems without locks, and (EINVAL) of kernels without F_OFD_SETLK.
_NOT_SUPPORTED: Final = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_MORE_FILES: Final = "; raise the limit of open files (ulimit -n)"


PRIVATE_FOLDER: Final = 0o700
PRIVATE_FILE: Final = 0o600
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class ObjectLocks:
    """The locks of this process on the objects of one cache: shared holds, and exclusive locks for eviction.

    Safe for threads.

    Args:
        folder: folder of the lock files.

    Raises:
        ConfigError: the file system or the kernel does not support these locks, or a lock file cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hold_files: dict[int, int] = {}  # descriptors for holds, by number of the lock file
        self._exclusive_files: dict[int, int] = {}  # descriptors for exclusive locks, likewise
        self._counts: Counter[Digest] = Counter()  # holds of this process
        self._abandoned: deque[Digest] = deque()  # holds to release as soon as `_lock` is free
        self._lock = threading.Lock()  # guards `_counts` and the holds
        self._opening = threading.Lock()  # guards the opening of lock files
        try:
            make_private(folder)
            # A test: if these locks are supported, unlocking a byte that is not locked does nothing; else it fails.
            fcntl.fcntl(self._descriptor(self._exclusive_files, 0), SETLK, byte_range(fcntl.F_UNLCK, 0))
            # All files are created now, because the disk may have no inodes left later.
            names = {f"{number:02x}" for number in range(_NUM_FILES)}
            for name in names.difference(os.listdir(folder)):
                os.close(open_lock_file(folder / name))
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot lock files in {folder}: {error}{_advice(error)}") from error

    def acquire(self, digest: Digest) -> None:
        """Add one hold on an object; wait while another process is about to evict it.

        Raises UnavailableError if this process may not open more files, or the kernel has no more locks.
        """
        with self._lock:
            count = self._counts.get(digest, 0)
            if not count:
                self._hold(digest)
            self._counts[digest] = count + 1
        self._release_abandoned()

    def release(self, digest: Digest) -> None:
        """Remove one hold."""
        with self._lock:
            if self._counts[digest]:  # 0 after `close`, which has removed every hold
                self._release(digest)
        self._release_abandoned()

    def abandon(self, digests: Iterable[Digest]) -> None:
        """Remove one hold per digest. Never blocks: the caller is a finalizer, which may interrupt any other call."""
        self._abandoned.extend(digests)
        self._release_abandoned()

    def count(self, digest: Digest) -> int:
        """Return the number of holds of this process on an object."""
        return self._counts[digest]

    def try_lock_exclusive(self, digest: Digest) -> bool:
        """Lock an object exclusively until `unlock`; return False if any process has a hold on it.

        Call it only inside a write transaction of the catalogue: one thread of the machine at a time has one.
        """
        try:
            self._set(self._exclusive_files, SETLK, fcntl.F_WRLCK, digest)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def unlock(self, digest: Digest) -> None:
        """Release an exclusive lock."""
        self._set(self._exclusive_files, SETLK, fcntl.F_UNLCK, digest)

    def is_held(self, digest: Digest) -> bool:
        """Return whether any process has a hold on an object."""
        # Not a descriptor of `_hold_files`: the locks that were taken through it would not be reported.
        descriptor, offset = self._locate(self._exclusive_files, digest)
        answer = fcntl.fcntl(descriptor, _GETLK, byte_range(fcntl.F_WRLCK, offset))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Remove every hold; later calls of `release` do nothing."""
        # Another thread may be using a descriptor to release a hold.
        with self._lock:
            self.close_after_fork()

    def close_after_fork(self) -> None:
        """Close inherited descriptors in a forked child; the parent's locks stay."""
        # Without `_lock`: if another thread of the parent had it at the fork, it is never released in the child.
        for descriptor in [*self._hold_files.values(), *self._exclusive_files.values()]:
            os.close(descriptor)
        self._hold_files.clear()
        self._exclusive_files.clear()
        self._counts.clear()

    def _hold(self, digest: Digest) -> None:
        try:
            self._set(self._hold_files, SETLKW, fcntl.F_RDLCK, digest)
        except OSError as error:
            advice = _MORE_FILES if error.errno in _TOO_MANY_FILES else ""
            raise UnavailableError(
                f"cannot lock object {digest[:12]}... in {self._folder}: {error}{advice}"
            ) from error

    def _release(self, digest: Digest) -> None:
        self._counts[digest] -= 1
        if not self._counts[digest]:
            del self._counts[digest]
            self._set(self._hold_files, SETLK, fcntl.F_UNLCK, digest)

    def _release_abandoned(self) -> None:
        # Never wait for `_lock`: a finalizer may run while its own thread has it. The thread that has it repeats this
        # check after the unlock.
        while self._abandoned and self._lock.acquire(blocking=False):
            try:
                while self._abandoned:
                    self._release(self._abandoned.popleft())
            finally:
                self._lock.release()

    def _set(self, descriptors: dict[int, int], call: int, kind: int, digest: Digest) -> None:
        descriptor, offset = self._locate(descriptors, digest)
        fcntl.fcntl(descriptor, call, byte_range(kind, offset))

    def _locate(self, descriptors: dict[int, int], digest: Digest) -> tuple[int, int]:
        number = int(digest[:2], 16) % _NUM_FILES
        # 66 bits of the digest choose file and offset, so two objects hardly ever share a byte. If they do, releasing
        # one object unlocks the other too, because holds are counted per digest.
        return self._descriptor(descriptors, number), int(digest[2:17], 16)

    def _descriptor(self, descriptors: dict[int, int], number: int) -> int:
        descriptor = descriptors.get(number)
        if descriptor is None:
            with self._opening:
                # Another thread may have opened the file meanwhile.
                descriptor = descriptors.get(number)
                if descriptor is None:
                    descriptor = descriptors[number] = open_lock_file(self._folder / f"{number:02x}")
        return descriptor


def byte_range(kind: int, offset: int, length: int = 1) -> bytes:
    """Return the argument of fcntl for a lock of `length` bytes; `kind` is F_RDLCK, F_WRLCK or F_UNLCK."""
    return _FLOCK.pack(kind, os.SEEK_SET, offset, length, 0)


def _advice(error: OSError) -> str:
    if error.errno in _TOO_MANY_FILES:
        return _MORE_FILES
    if error.errno in _NOT_SUPPORTED:
        return "; put the cache on a local disk of a Linux machine"
    return "; check the permissions and the disk of this folder"


@contextmanager
def locked_byte(path: Path, offset: int) -> Iterator[None]:
    """Lock one byte of a file exclusively, among threads and processes, inside the block. Raises OSError."""
    descriptor = open_lock_file(path)
    try:
        fcntl.fcntl(descriptor, SETLKW, byte_range(fcntl.F_WRLCK, offset))
        yield
    finally:
        # Unlocked explicitly: closing does not release the lock while a forked child has a copy of the descriptor.
        fcntl.fcntl(descriptor, SETLK, byte_range(fcntl.F_UNLCK, offset))
        os.close(descriptor)


# A user who may open a file for reading may also lock it for any time, and so stop every process of a cache.
# Therefore three kinds of paths are closed to other users: new cache folders, lock files, and folders of files that
# are locked. The owner may open the cache's folder by `chmod`. Then others can read resident objects, but not open
# the other two.


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


# LMDB's own locks identify processes and threads by their ids, and those of two containers may be equal: a reader
# would be refused, and the end of a writer that waits could release the mutex of another one. So the catalogue is
# opened without them (`MDB_NOLOCK`), and this lock replaces them. It belongs to an open file description, as object
# locks do: the kernel releases it when the process ends, in whichever PID namespace the process runs.


# mdb.c of https://github.com/LMDB/lmdb: a process that reads with LMDB's locks has an exclusive lock on the byte at
# the offset of its process id. Ids are smaller than this; the lock of transactions is the two bytes behind them.
_MAX_PROCESS_ID: Final = 1 << 31
# A writer that waits for readers has the gate, so no reader begins after it. With one byte, many readers that
# overlap could delay a writer for minutes: the kernel grants a shared lock while another process has one.
_GATE, _TRANSACTION = _MAX_PROCESS_ID, _MAX_PROCESS_ID + 1
_READ: Final = byte_range(fcntl.F_RDLCK, _GATE, 2)
_PASS_GATE: Final = byte_range(fcntl.F_UNLCK, _GATE)
_CLOSE_GATE: Final = byte_range(fcntl.F_WRLCK, _GATE)
_WRITE: Final = byte_range(fcntl.F_WRLCK, _TRANSACTION)
_UNLOCK: Final = byte_range(fcntl.F_UNLCK, _GATE, 2)


class TransactionLock:
    """The lock of one catalogue. Safe for threads; not reentrant.

    Args:
        path: LMDB's lock file.

    Raises:
        UnavailableError: a process of an earlier version, which uses LMDB's locks, has the catalogue open.
        OSError: the file cannot be opened or locked.
    """

    def __init__(self, path: Path) -> None:
        # The threads of a process share the descriptor, and its locks do not exclude each other.
        self._threads = threading.Lock()
        self._owner: int | None = None  # the thread that is inside
        self._folder = path.parent.parent
        self._descriptor = open_lock_file(path)
        try:
            # Shared by all processes of this version, until they close the file. It makes a process of an earlier
            # version fail to lock its process id, and fails itself if such a process has done so already.
            fcntl.fcntl(self._descriptor, SETLK, byte_range(fcntl.F_RDLCK, 1, _MAX_PROCESS_ID - 1))
        except OSError as error:
            self.close()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise UnavailableError(
                f"a process of an earlier version of datasvc has the cache {self._folder} open, and uses other "
                "locks: end the jobs and servers of that version on this node first, or use another cache folder"
            ) from error

    def shared(self) -> AbstractContextManager[None]:
        """Exclude writers inside the block; wait for those that have begun or wait themselves. Raises OSError."""
        return self._locked(_READ, _PASS_GATE)

    def exclusive(self) -> AbstractContextManager[None]:
        """Exclude readers and other writers inside the block; wait for those that have begun. Raises OSError."""
        return self._locked(_CLOSE_GATE, _WRITE)

    def close(self) -> None:
        """Close the file, after the transaction that another thread of this process has begun."""
        # The thread that is inside itself closes it when an interrupt has ended its transaction halfway.
        if self._owner == threading.get_ident():
            self.close_after_fork()
            return
        with self._threads:
            self.close_after_fork()

    def close_after_fork(self) -> None:
        """Close the inherited file in a forked child: with it, the child would keep the locks of a killed parent."""
        # Without `_threads`: if another thread of the parent had it at the fork, it is never released in the child.
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @contextmanager
    def _locked(self, first: bytes, second: bytes) -> Iterator[None]:
        if self._owner == threading.get_ident():
            raise UnavailableError(
                f"a transaction of the cache {self._folder} has not ended in this thread: a signal handler used the "
                "cache, or an interrupt ended the transaction halfway; do not use the cache in handlers of signals"
            )
        with self._threads:
            if self._descriptor < 0:
                raise UnavailableError(f"the cache {self._folder} was closed while a thread used it")
            # Inside `try`: a signal may raise an exception right after the lock is taken.
            try:
                self._owner = threading.get_ident()
                fcntl.fcntl(self._descriptor, SETLKW, first)
                fcntl.fcntl(self._descriptor, SETLKW, second)
                yield
            finally:
                self._owner = None
                if self._descriptor >= 0:
                    fcntl.fcntl(self._descriptor, SETLK, _UNLOCK)


# The kernel releases the lock when the process exits or crashes, so no timeout and no clock is needed. A lock by
# `flock` belongs to the open file: other threads of the same process find the file locked too, and closing another
# descriptor of the file does not release the lock.


class RunningJob(NamedTuple):
    """A process that has the cache open, or one access order of such a process.

    Attributes:
        lease_id: lease of the process; the id of an access order adds a dot and a number.
        clock_bytes: bytes that the job has served, as it last reported.
        note: description of the job, such as the split that it reads; may be empty.
    """

    lease_id: str
    clock_bytes: int
    note: str


class Lease:
    """The lease of this process on a cache.

    Args:
        folder: folder of the leases.

    Raises:
        ConfigError: the file cannot be created or locked.
    """

    def __init__(self, folder: Path) -> None:
        self.id = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._path = folder / self.id
        # The file is locked before it is renamed, so that no process sees an unlocked lease of a running process.
        temporary = folder / f"{TEMPORARY_PREFIX}{self.id}"
        self._descriptor = -1
        try:
            self._descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            temporary.rename(self._path)
        except OSError as error:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                temporary.unlink(missing_ok=True)
            raise ConfigError(
                f"cannot lock a file in {folder}: {error}; put the cache on a local disk that supports file locks"
            ) from error

    def abandon(self) -> None:
        """Close the descriptor that a forked child has inherited; the lease stays with the parent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def close(self) -> None:
        """End the lease. Closing again does nothing."""
        if self._descriptor >= 0:
            # If the file cannot be removed here, the next process that finds the lease unlocked removes it.
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self.abandon()


def name_order(lease_id: str, number: int) -> str:
    """Return the job id of one access order of a process. The job lives at most as long as the lease."""
    return f"{lease_id}.{number}"


def is_order(job_id: str) -> bool:
    """Return whether a job id names an access order, rather than a process."""
    return "." in job_id


def lease_of(job_id: str) -> str:
    """Return the lease of the process that a job belongs to."""
    return job_id.partition(".")[0]


def is_locked(path: Path | str) -> bool:
    """Return whether a running process or thread keeps `path` locked; False if there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        # A shared lock, so that two checks at the same time do not exclude each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        unlock_and_close(descriptor)


def unlock_and_close(descriptor: int) -> None:
    """Release a lock and close its descriptor."""
    # Unlocked explicitly: closing does not release the lock while a forked child has a copy of the descriptor.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def is_held(folder: Path, lease_id: str) -> bool:
    """Return whether the process of a lease still runs; if it has ended, remove the file of the lease."""
    path = folder / lease_id
    held = is_locked(path)
    if not held:
        path.unlink(missing_ok=True)
    return held


def sweep(folder: Path) -> None:
    """Remove the lease files of ended processes, temporary ones too.

    Call it only while no other process can create a lease, because a new lease is not locked at first.
    """
    for path in folder.iterdir():
        is_held(folder, path.name)
