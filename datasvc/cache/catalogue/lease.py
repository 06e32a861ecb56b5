"""Leases: a process that has a cache open keeps a file locked, which shows other processes that it still runs.

The kernel releases the lock when the process exits or crashes, so no timeout and no clock is needed. A lock by
`flock` belongs to the open file: other threads of the same process find the file locked too, and closing another
descriptor of the file does not release the lock.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from datasvc.durable import TEMPORARY_PREFIX
from datasvc.errors import ConfigError


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
