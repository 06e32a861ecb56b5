"""A lease is a file that its holder keeps locked: the kernel drops the lock when the holder dies.

So nobody has to clean up after a crash, and no clock is involved. `flock` belongs to the open file, so the lock is
seen by other threads of the same process too, and is not lost when another descriptor of the file is closed.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

from datasvc.durable import TEMPORARY_PREFIX
from datasvc.errors import ConfigError


class Lease:
    """The lease of this process on a cache.

    Args:
        folder: the cache's folder of leases.

    Raises:
        ConfigError: the file system has no locks.
    """

    def __init__(self, folder: Path) -> None:
        self.id = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._path = folder / self.id
        # Locked before it has its name: a lease is never seen unlocked while its holder lives.
        unnamed = folder / f"{TEMPORARY_PREFIX}{self.id}"
        self._descriptor = -1
        try:
            self._descriptor = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            unnamed.rename(self._path)
        except OSError as error:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                unnamed.unlink(missing_ok=True)
            raise ConfigError(
                f"{folder} cannot hold leases: {error}; put the cache on a local disk with file locks"
            ) from error

    def abandon(self) -> None:
        """Close the copy of the descriptor that a forked child has: the lease is the parent's."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def close(self) -> None:
        """Give the lease up. Calling it again does nothing."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def name_order(lease_id: str, number: int) -> str:
    """Return what names one order of a process: it lives at most as long as the lease does."""
    return f"{lease_id}.{number}"


def is_order(owner: str) -> bool:
    """Return whether `name_order` gave it, so that it is no lease."""
    return "." in owner


def lease_of(owner: str) -> str:
    """Return the lease of an order; a lease's own id is its own."""
    return owner.partition(".")[0]


def is_locked(path: Path | str) -> bool:
    """Return whether a living process or thread keeps `path` locked; False where there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        unlock_and_close(descriptor)


def unlock_and_close(descriptor: int) -> None:
    """Free a lock also where a child, forked meanwhile, has a copy of the descriptor: closing alone would not."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def is_held(folder: Path, lease_id: str) -> bool:
    """Return whether the holder of a lease still lives; a dead one's file is removed."""
    path = folder / lease_id
    held = is_locked(path)
    if not held:
        path.unlink(missing_ok=True)
    return held


def sweep(folder: Path) -> None:
    """Remove the lease files of dead holders, and what was to be one. Call it while nobody takes a lease."""
    for path in folder.iterdir():
        is_held(folder, path.name)
