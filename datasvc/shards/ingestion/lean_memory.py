"""Settings of the memory allocators: freed memory is returned to the operating system at once.

An ingest processes much data in batches of different sizes. Allocators would cache the memory of a batch, but it does
not fit the next batch. The process that calls `ingest` uses `lean_arrow`, whose setting ends with the call.
Worker processes (not those of Ray) use `keep_lean`, whose settings last until they exit; so does the server of
`datasvc ui`, each page of which reads other data.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa

_MMAP_THRESHOLD_OPTION: Final = -3  # number of the option of `mallopt`, from glibc's malloc.h
_THRESHOLD_BYTES: Final = 256 << 10
_lock = threading.Lock()
_num_inside = 0
_previous_pool: pa.MemoryPool | None = None


@contextmanager
def lean_arrow() -> Iterator[None]:
    """Make Arrow use the system's allocator inside the block, because Arrow's own pools keep freed memory.

    Processes that are forked inside the block inherit the setting. Several threads may be inside at once.
    """
    global _num_inside, _previous_pool  # noqa: PLW0603 - Arrow has one default pool per process
    with _lock:
        if not _num_inside:
            _previous_pool = pa.default_memory_pool()
            pa.set_memory_pool(pa.system_memory_pool())
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if not _num_inside:
                pa.set_memory_pool(_previous_pool)


def keep_lean() -> None:
    """Make a process that builds shards, or serves pages, return freed memory to the operating system at once."""
    # With the system's pool, glibc maps each allocation above a threshold separately, and unmaps it when it is freed.
    # By default, glibc raises the threshold after the first free. It then caches freed memory in blocks that do not
    # fit later batches, and the process needs a quarter more memory. So the threshold is fixed here.
    pa.set_memory_pool(pa.system_memory_pool())
    set_option: Any = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:  # only glibc has this option; other C libraries do not need it
        set_option(_MMAP_THRESHOLD_OPTION, _THRESHOLD_BYTES)
