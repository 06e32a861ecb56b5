"""Memory that is freed goes back to the system at once: bulk data passes, and no two batches are of one size."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pyarrow as pa

_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
_MAPPED_BYTES = 128 << 10


@contextmanager
def lean_arrow() -> Iterator[None]:
    """Let Arrow allocate from the system while the block runs: pools of its own keep what is freed.

    Processes that are forked in the block inherit no such pool.
    """
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(before)


def keep_no_freed_memory() -> None:
    """Make this process give back what is freed for good, large blocks at once. For processes of our own."""
    pa.set_memory_pool(pa.system_memory_pool())
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library: no harm
            # Fixed: else it grows with the largest block that was freed, and such blocks are kept from then on.
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
