"""The lock of the catalogue's transactions: several processes read at a time, or one thread of the machine writes.

LMDB's own locks identify processes and threads by their ids, and those of two containers may be equal: a reader would
be refused, and the end of a writer that waits could release the mutex of another one. So the catalogue is opened
without them (`MDB_NOLOCK`), and this lock replaces them. It belongs to an open file description, as object locks do:
the kernel releases it when the process ends, in whichever PID namespace the process runs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

from datasvc.cache.catalogue.object_locks import SETLK, SETLKW, byte_range, open_lock_file
from datasvc.errors import UnavailableError

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
