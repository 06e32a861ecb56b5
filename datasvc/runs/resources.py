"""`ResourceMeter`: processors and memory that the process of a run log uses, and memory in use on its node.

All of it is read from the kernel's counters, by the thread that writes the log: a program that reports its steps pays
nothing for it. Names and units are promises: logs, `--json` and links have them.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final

from datasvc.threads import count_processors

CPU: Final = "process_cpu_percent"
MEMORY: Final = "process_memory_bytes"
NODE_MEMORY: Final = "node_memory_bytes"
GPU_MEMORY: Final = "process_gpu_memory_bytes"
RESOURCES: Final[Mapping[str, tuple[str, str]]] = {
    CPU: ("CPU of rank 0 with its child processes", "% of its cores"),
    MEMORY: ("memory of the process of rank 0", "bytes"),
    NODE_MEMORY: ("memory in use on the node of rank 0", "bytes"),
    GPU_MEMORY: ("GPU memory that torch holds for rank 0", "bytes"),
}
"""Curves of resources, in the order in which they are shown, with their titles and units."""
_SHORTEST_S: Final = 0.1  # the kernel counts the time of other processes in ticks of 10 ms
_MAX_PROCESSES: Final = 256  # children whose times are read
_READINGS: Final = 3


class ResourceMeter:
    """Measures what this process uses from one call of `read` to the next.

    Args:
        now: clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._newest: dict[str, float] = {}
        self._last_s, self._last_used_s = now(), _processor_s()

    def read(self) -> Mapping[str, float]:
        """Return the values by the names of `RESOURCES`, without those that this machine does not have.

        The use of processors is the mean since the call before, in percent of all processors in the affinity mask of
        the process. It includes the descendants of the process, such as workers of a loader. Resident memory is
        that of this process alone: a sum would count the pages that forked processes share several times.
        Within 0.1 s of the call before, the same values are returned.
        """
        now_s = self._now()
        elapsed_s = now_s - self._last_s
        if elapsed_s < _SHORTEST_S and self._newest:
            return self._newest
        used_s = _processor_s()
        values = {MEMORY: _resident_bytes(), NODE_MEMORY: _node_bytes(), GPU_MEMORY: _gpu_bytes()}
        if elapsed_s > 0:
            # The sum falls if a child's time is lost: the program ignores SIGCHLD, or the child is a daemon now.
            values[CPU] = 100 * max(0.0, used_s - self._last_used_s) / (elapsed_s * count_processors())
        self._last_s, self._last_used_s = now_s, used_s
        self._newest = {name: value for name in RESOURCES if (value := values.get(name)) is not None}
        return self._newest


def _processor_s() -> float:
    """Return the processor time in seconds of this process and of its descendants, those that ended included."""
    for _ in range(_READINGS):
        ended_s = _usage_s(resource.RUSAGE_CHILDREN)
        live_s = _descendants_s()
        # A child that ends between the two readings would be in both, or in neither: read again.
        if ended_s == _usage_s(resource.RUSAGE_CHILDREN):
            break
    return _usage_s(resource.RUSAGE_SELF) + ended_s + live_s


def _usage_s(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def _descendants_s() -> float:
    """Return the processor time in seconds of the live descendants, and of those that they have waited for."""
    ticks, pids = 0, _children("self")
    for pid in pids:  # the loop appends to it
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if len(fields) > 14:  # else it has ended
            ticks += sum(map(int, fields[11:15]))
            pids += _children(pid)[: max(0, _MAX_PROCESSES - len(pids))]
    return ticks / os.sysconf("SC_CLK_TCK")


def _children(pid: str) -> list[str]:
    """Return the children of a process: each is listed at the thread that has started it."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [child for task in tasks for child in _read(f"/proc/{pid}/task/{task}/children").split()]


def _resident_bytes() -> float | None:
    fields = _read("/proc/self/statm").split()
    return float(int(fields[1]) * os.sysconf("SC_PAGE_SIZE")) if len(fields) > 1 else None


def _node_bytes() -> float | None:
    """Return the bytes that programs of the node cannot have: all but free memory and caches."""
    rows = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    if not {"MemTotal", "MemAvailable"} <= rows.keys():
        return None
    return 1024.0 * (int(rows["MemTotal"].split()[0]) - int(rows["MemAvailable"].split()[0]))


def _gpu_bytes() -> float | None:
    """Return the bytes of GPUs that torch holds for this process, tensors and its cache; None: it uses no GPU."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        if cuda is None or not cuda.is_initialized():
            return None
        # Not `mem_get_info`, which would create a context on devices that the program does not use.
        return float(sum(cuda.memory_reserved(device) for device in range(cuda.device_count())))
    except (AttributeError, RuntimeError):  # torch is being imported in another thread; the device has failed
        return None


def _read(path: str) -> str:
    """Return the text of a file of the kernel; "" if the process has ended, or the system has no such file."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
