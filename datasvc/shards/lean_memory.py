"""Memory that is freed goes back to the system: bulk data passes through, and no two batches are of one size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa


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
