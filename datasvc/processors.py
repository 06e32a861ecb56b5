"""How many processors this process may use."""

from __future__ import annotations

import os


def count_processors() -> int:
    """Return the number of processors that this process may run on; of all where the system cannot tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
