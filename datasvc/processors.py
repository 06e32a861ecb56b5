"""Number of processors that this process may use; it is the basis for numbers of threads and worker processes."""

from __future__ import annotations

import os


def count_processors() -> int:
    """Return the number of processors in this process's affinity mask, or of all processors without such a mask."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
