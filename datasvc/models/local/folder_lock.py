"""A lock on a folder of a model on a node, which one process of one job holds as long as it may change the folder.

The kernel releases the lock when the process ends, so a killed job leaves none behind. The lock belongs to the open
file: a second manager of the same process is refused too.
"""

from __future__ import annotations

import fcntl
import os
import socket
import weakref
from datetime import UTC, datetime
from pathlib import Path

from datasvc.errors import BusyError, ConfigError
from datasvc.repository.store.retries import map_exceptions

_MAX_TEXT_BYTES = 512


class FolderLock:
    """Lock of the file `path`, which is created. `close` releases it.

    Raises:
        BusyError: another process, or another manager of this one, holds the lock; the message says which.
        ConfigError: the file system has no locks.
        UnavailableError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        with map_exceptions("write", str(path)):
            self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            self._acquire(path)
        except BaseException:
            os.close(self._descriptor)
            raise
        _held.add(self)

    def _acquire(self, path: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, _MAX_TEXT_BYTES, 0).decode("utf-8", "replace").strip()
            raise BusyError(
                f"{path.parent} is in use by {holder or 'another process'}: another job keeps its versions of model "
                f"{path.parent.name!r} there. Wait for its end or end it, or give this job another folder or model "
                "name; nothing was changed"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"cannot lock {path}: {error}; use a local disk, whose file system has locks"
            ) from error
        now = datetime.now(UTC).isoformat(timespec="seconds")
        text = f"process {os.getpid()} on {socket.gethostname()}, since {now}"
        with map_exceptions("write", str(path)):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{text}\n".encode(), 0)

    def close(self) -> None:
        """Release the lock. Closing again does nothing."""
        if self._descriptor >= 0:
            # Closing alone would not release it while a forked child has a copy of the descriptor.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.abandon()

    def abandon(self) -> None:
        """Close the descriptor, such as the copy of a forked child; the lock stays with whoever else has it open."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        _held.discard(self)


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()
"""Locks that this process holds."""


def _abandon_all() -> None:
    # A child that outlives its killed parent, such as a worker of a loader, must not hold the lock of the job.
    for lock in list(_held):
        lock.abandon()


os.register_at_fork(after_in_child=_abandon_all)
