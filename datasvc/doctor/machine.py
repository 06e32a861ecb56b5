"""Checks the limits of this machine and process: open files, shared memory, ports."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from datasvc.doctor.finding import Finding
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
