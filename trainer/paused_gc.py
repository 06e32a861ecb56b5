"""Pauses Python's garbage collection around imports.

An import makes many objects and almost no garbage. With collections, that of torch takes a quarter longer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_gc() -> Iterator[None]:
    """Do not collect garbage in this context. Outside it is collected if it was before; contexts may be nested."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
