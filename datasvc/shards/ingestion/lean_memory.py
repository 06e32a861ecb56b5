"""Memory that is freed goes back to the system: bulk data passes through, and no two batches are of one size."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa

_MMAP_THRESHOLD: Final = -3  # glibc's malloc.h
_BATCH_BYTES: Final = 256 << 10
_lock = threading.Lock()
_num_inside = 0
_pool_outside: pa.MemoryPool | None = None


@contextmanager
def lean_arrow() -> Iterator[None]:
    """Let Arrow allocate from the system while the block runs: pools of its own keep what is freed.

    Processes that are forked in the block inherit no such pool. Several threads may be inside at once.
    """
    global _num_inside, _pool_outside  # noqa: PLW0603 - Arrow's pool is one for the process
    with _lock:
        if not _num_inside:
            _pool_outside = pa.default_memory_pool()
            pa.set_memory_pool(pa.system_memory_pool())
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if not _num_inside:
                pa.set_memory_pool(_pool_outside)


def keep_lean() -> None:
    """Let a process that builds shards, and does nothing else, give memory back as soon as it is freed.

    Arrow allocates from the system, and that maps whatever is as large as a batch by itself. Left alone, glibc begins
    to keep such memory once some was freed, in pieces that fit no later batch: a quarter more in the end.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    set_option: Any = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:  # other C libraries have no such option, and need none
        set_option(_MMAP_THRESHOLD, _BATCH_BYTES)
