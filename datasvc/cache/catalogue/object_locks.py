"""Holds: what a process maps is locked by it, object by object, and the kernel drops the locks when it dies.

One lock of one byte per object, at an offset that its digest gives, in one of a few files: no entry to write, none to
clean up, no clock. They are locks of the open file description (`F_OFD_SETLK`), so two descriptors of one process
exclude each other as two processes do: whoever evicts uses a descriptor of its own and cannot seize what its own
process holds.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from datasvc.errors import ConfigError, UnavailableError
from datasvc.repository import Digest

# The kernel searches the locks of a file one by one: many files keep each list short.
_NUM_FILES: Final = 64
_FLOCK: Final = struct.Struct("@hhqqi4x")  # fcntl.h: type, whence, start, len, pid
_GETLK, _SETLK, _SETLKW = 36, 37, 38  # fcntl.h: F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW


_TOO_MANY_FILES: Final = (errno.EMFILE, errno.ENFILE)


class Holds:
    """The holds of this process on the objects of one cache, and the right to seize what nobody holds.

    Threads may share it.

    Args:
        folder: for the lock files.

    Raises:
        ConfigError: the file system, or this system, has no such locks.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mine: dict[int, int] = {}  # descriptors by number of the file
        self._others: dict[int, int] = {}
        self._counts: Counter[Digest] = Counter()
        self._abandoned: deque[Digest] = deque()
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        try:
            folder.mkdir(exist_ok=True)
            self._apply(self._descriptor(self._others, 0), _SETLK, fcntl.F_UNLCK, 0)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"{folder} cannot hold locks: {error}; put the cache on a local disk of a Linux machine"
            ) from error

    def acquire(self, digest: Digest) -> None:
        """Hold an object, once more; waits for whoever is about to evict it.

        Raises UnavailableError: this process may open no more files, or the kernel has no more locks.
        """
        with self._lock:
            count = self._counts.get(digest, 0)
            if not count:
                self._hold(digest)
            self._counts[digest] = count + 1
        self._release_abandoned()

    def release(self, digest: Digest) -> None:
        """Give up one hold."""
        with self._lock:
            self._release(digest)
        self._release_abandoned()

    def abandon(self, digests: Iterable[Digest]) -> None:
        """Release holds from a finalizer: it may run in the middle of any call of its thread, so it never waits."""
        self._abandoned.extend(digests)
        self._release_abandoned()

    def count(self, digest: Digest) -> int:
        """Return how often this process holds the object."""
        return self._counts[digest]

    def seize(self, digest: Digest) -> bool:
        """Lock an object that nobody holds, so that nobody can until `let_go`; False where somebody holds it.

        One thread of the machine at a time may do so: call it in a write transaction of the catalogue.
        """
        try:
            self._set(self._others, _SETLK, fcntl.F_WRLCK, digest)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def let_go(self, digest: Digest) -> None:
        """Undo `seize`."""
        self._set(self._others, _SETLK, fcntl.F_UNLCK, digest)

    def is_held(self, digest: Digest) -> bool:
        """Return whether any process holds the object."""
        descriptor, offset = self._place(self._others, digest)
        found = fcntl.fcntl(descriptor, _GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Give up every hold. In a forked child: let go of the parent's descriptors, which changes nothing for it."""
        for descriptor in [*self._mine.values(), *self._others.values()]:
            os.close(descriptor)
        self._mine.clear()
        self._others.clear()
        self._counts.clear()

    def _hold(self, digest: Digest) -> None:
        try:
            self._set(self._mine, _SETLKW, fcntl.F_RDLCK, digest)
        except OSError as error:
            advice = "; raise the limit of open files (ulimit -n)" if error.errno in _TOO_MANY_FILES else ""
            raise UnavailableError(f"cannot hold {digest[:12]}... in {self._folder}: {error}{advice}") from error

    def _release(self, digest: Digest) -> None:
        self._counts[digest] -= 1
        if not self._counts[digest]:
            del self._counts[digest]
            self._set(self._mine, _SETLK, fcntl.F_UNLCK, digest)

    def _release_abandoned(self) -> None:
        # Whoever has the lock, this thread perhaps, looks once more when it has freed it.
        while self._abandoned and self._lock.acquire(blocking=False):
            try:
                while self._abandoned:
                    self._release(self._abandoned.popleft())
            finally:
                self._lock.release()

    def _set(self, descriptors: dict[int, int], call: int, kind: int, digest: Digest) -> None:
        descriptor, offset = self._place(descriptors, digest)
        self._apply(descriptor, call, kind, offset)

    def _place(self, descriptors: dict[int, int], digest: Digest) -> tuple[int, int]:
        number = int(digest[:2], 16) % _NUM_FILES
        # 60 bits of the digest: two objects that share a byte would only be held and let go together.
        return self._descriptor(descriptors, number), int(digest[2:17], 16)

    def _descriptor(self, descriptors: dict[int, int], number: int) -> int:
        found = descriptors.get(number)
        if found is None:
            with self._opening:
                found = descriptors.get(number)
                if found is None:
                    path = self._folder / f"{number:02x}"
                    found = descriptors[number] = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        return found

    @staticmethod
    def _apply(descriptor: int, call: int, kind: int, offset: int) -> None:
        fcntl.fcntl(descriptor, call, _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0))


@contextmanager
def locked_byte(path: Path, offset: int) -> Iterator[None]:
    """Have one byte of a lock file alone, among threads and processes; waits for whoever has it. Raises OSError."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.fcntl(descriptor, _SETLKW, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0))
        yield
    finally:
        # A child, forked meanwhile, may have a copy of the descriptor: closing alone would not free the lock.
        fcntl.fcntl(descriptor, _SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, offset, 1, 0))
        os.close(descriptor)
