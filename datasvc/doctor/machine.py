"""Checks this machine and its folders: open files, shared memory, ports, clocks, file locks, free space."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from datasvc.cache.catalogue.configuration import Configuration, check_folder, file_system_of
from datasvc.cache.catalogue.object_locks import ObjectLocks
from datasvc.doctor.finding import Finding
from datasvc.durable import TEMPORARY_PREFIX
from datasvc.errors import DatasvcError
from datasvc.repository.objects.objects import digest_of
from datasvc.sizes import format_size

# A mapped shard needs two open files, a connection one; deploy/systemd/datasvc.service has the largest number.
_MANY_FILES: Final = 65_536
_ENOUGH_FILES: Final = 8_192
_FEW_FILES: Final = 1_024
# Batches of worker processes and of jobs that share decoding are there. Docker's default is 64 MiB.
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the memory itself is checked
_MIN_SHARED_BYTES: Final = 1 << 30


_LARGE_S: Final = 5.0
# S3 refuses requests that are older, and `gc` refuses to run at an hour.
_TOO_LARGE_S: Final = 900.0


_MIN_FREE: Final = 0.02  # share of the bytes or inodes of a disk, below which it counts as nearly full
_MOUNTS: Final = Path("/proc/self/mountinfo")
_LOCAL_DISK: Final = "put the cache on a local disk of this machine"
_REPOSITORY_LOCKS: Final = (
    "mount the file system with locks (NFS: version 4, or 3 without nolock), or use another one"
)


def examine_open_files() -> Finding:
    """Return whether this process may open enough files; datasvc raises its soft limit when it needs more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"at most {hard:,} open files ({soft:,} until more are needed)"
    advice = (
        f"raise the hard limit to {_MANY_FILES}: LimitNOFILE= of systemd, docker run --ulimit nofile={_MANY_FILES}"
    )
    if hard == resource.RLIM_INFINITY:
        return Finding("open files", "ok", "no limit")
    if hard < _FEW_FILES:
        return Finding("open files", "problem", text, advice)
    if hard < _ENOUGH_FILES:
        return Finding("open files", "warning", text, advice)
    return Finding("open files", "ok", text)


def examine_shared_memory(folder: Path = _SHARED_MEMORY) -> Finding:
    """Return whether the shared memory has room for batches of several processes."""
    try:
        status = os.statvfs(folder)
    except OSError as error:
        return Finding("shared memory", "problem", f"{folder} cannot be used: {error}", f"mount a tmpfs at {folder}")
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"{folder} has {format_size(total)}, {format_size(free)} free"
    if total >= _MIN_SHARED_BYTES:
        return Finding("shared memory", "ok", text)
    advice = "docker run --shm-size=8g, or in Kubernetes an emptyDir with medium: Memory at /dev/shm"
    return Finding("shared memory", "warning", text, advice)


def examine_ports(ports: Mapping[int, str]) -> Iterator[Finding]:
    """Yield for each port, with the command that listens on it by default, whether it is free."""
    for port, command in ports.items():
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", port))
            except OSError as error:
                text = f"`{command}` cannot use it: {error}"
                advice = f"if no `{command}` runs here already, give another --port"
                yield Finding(f"port {port}", "warning", text, advice)
            else:
                yield Finding(f"port {port}", "ok", f"free for `{command}`")


def examine_clock(check: str, before_s: float, theirs_s: float, after_s: float) -> Finding:
    """Return whether a clock agrees with the one of this machine.

    Args:
        check: whose clock it is.
        before_s: time of this machine before the request, in seconds since 1970.
        theirs_s: time in the answer, rounded down to a second or not.
        after_s: time of this machine after the answer.
    """
    difference_s = clock_difference_s(before_s, theirs_s, after_s)
    if abs(difference_s) < _LARGE_S:
        return Finding(check, "ok", f"within {_LARGE_S:.0f} s of the clock of this machine")
    order = "ahead of" if difference_s > 0 else "behind"
    text = f"{abs(difference_s):.0f} s {order} the clock of this machine"
    advice = "synchronize the clocks of both machines, for example with chrony"
    return Finding(check, "problem" if abs(difference_s) >= _TOO_LARGE_S else "warning", text, advice)


def clock_difference_s(before_s: float, theirs_s: float, after_s: float) -> float:
    """Return the smallest difference, theirs minus ours, that explains an answer; 0 if equal clocks do."""
    if theirs_s > after_s:
        return theirs_s - after_s
    return min(0.0, theirs_s + 1 - before_s)


# The locks are tried as they are used: one holder, and another one that must be refused. Some network file systems
# report success to both.


def examine_cache(folder: Path) -> Iterator[Finding]:
    """Yield findings on the folder of a cache. It may be missing: then on the folder above it, which has its disk."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if existing != folder:
        yield Finding("cache", "ok", f"{folder} does not exist yet; {existing} is checked instead")
    try:
        check_folder(existing)
        with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=existing) as folder_of_locks:
            yield examine_cache_locks(Path(folder_of_locks), existing)
        yield from _examine_budget(existing)
    except DatasvcError as error:
        yield Finding("cache", "problem", str(error))
    except OSError as error:
        yield Finding(
            "cache", "problem", f"{existing} cannot be written: {error}", "check its permissions and its disk"
        )
    yield from examine_space("cache", existing)


def examine_cache_locks(folder: Path, shown: Path) -> Finding:
    """Return whether holds and evictions exclude each other in `folder`, which is empty; `shown` is its name here."""
    locks = ObjectLocks(folder)
    try:
        digest = digest_of(b"")
        locks.acquire(digest)
        is_excluded = not locks.try_lock_exclusive(digest)
    finally:
        locks.close()
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        is_excluded = is_excluded and flock_excludes(Path(file.name))
    if is_excluded:
        return Finding("cache locks", "ok", f"file locks work in {shown}")
    return Finding("cache locks", "problem", f"two processes can hold one file lock in {shown}", _LOCAL_DISK)


def examine_repository_locks(file: Path, folder: Path) -> Finding:
    """Return whether writers and `gc` exclude each other; `file` is a temporary one in `folder`."""
    try:
        if flock_excludes(file):
            return Finding("repository locks", "ok", f"file locks work in {folder}")
    except OSError as error:
        return Finding("repository locks", "problem", f"{folder} has no file locks: {error}", _REPOSITORY_LOCKS)
    text = f"two processes can hold one file lock in {folder}"
    return Finding("repository locks", "problem", text, _REPOSITORY_LOCKS)


def flock_excludes(path: Path) -> bool:
    """Return whether a lock of a file refuses a second holder. Raises OSError."""
    with path.open("r+b") as first, path.open("r+b") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def examine_space(check: str, folder: Path) -> Iterator[Finding]:
    """Yield whether the disk of `folder` has free bytes and inodes for this user."""
    status = os.statvfs(folder)
    kind = file_system_of(folder, _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape"))
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"{format_size(free)} of {format_size(total)} free on the disk of {folder} ({kind})"
    yield _judge_space(f"{check} disk", free, total, text, "delete what is not needed, or use another disk")
    if status.f_files:  # some file systems make inodes as they are needed
        text = f"{status.f_favail:,} of {status.f_files:,} inodes free"
        yield _judge_space(
            f"{check} inodes", status.f_favail, status.f_files, text, "delete small files of this disk"
        )


def _judge_space(check: str, free: int, total: int, text: str, advice: str) -> Finding:
    if not free:
        return Finding(check, "problem", text, advice)
    if free < _MIN_FREE * total:
        return Finding(check, "warning", text, advice)
    return Finding(check, "ok", text)


def _examine_budget(folder: Path) -> Iterator[Finding]:
    """Yield whether the budget of a cache fits its disk, if it has one."""
    configuration = Configuration.read(folder)
    if configuration is None or not configuration.budget_bytes:
        return
    status = os.statvfs(folder)
    total = status.f_blocks * status.f_frsize
    text = f"the budget of the cache is {format_size(configuration.budget_bytes)}"
    if configuration.budget_bytes <= total:
        yield Finding("cache budget", "ok", text)
    else:
        text = f"{text}, and its disk has {format_size(total)} in all"
        yield Finding("cache budget", "problem", text, f"datasvc stage REF --cache {folder} --budget 80%")
