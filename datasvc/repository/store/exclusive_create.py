"""Which drivers of fsspec create a file in one step, only if nothing is there: every commit rests on that.

fsspec's base class has `pipe_file(mode="create")` for all its drivers: it calls `exists()` and then writes. Between
the two another writer does the same, and the entry of one of them is lost. A probe by one writer cannot find that. So
a driver is judged by whose `pipe_file` it inherits: only those whose source was read are accepted.
"""

from __future__ import annotations

import threading
from typing import Final

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.memory import MemoryFileSystem

WRITABLE_STORES: Final = (
    "a local folder, S3 and what speaks its protocol (s3://), Google Cloud Storage (gs://), Azure Blob Storage "
    "(abfs://) or memory://"
)
# Each hands the condition to the store, in the request that writes: If-None-Match of S3 and Azure, ifGenerationMatch
# of Google. `Repository.create` tries whether the store heeds it.
_PACKAGES: Final = frozenset({"adlfs", "gcsfs", "s3fs"})
_METHODS: Final = frozenset({"pipe_file", "_pipe_file"})

_in_memory = threading.Lock()


def creates_exclusively(file_system: fsspec.AbstractFileSystem) -> bool:
    """Return whether `create` is one step of the store's. False where that is not certain."""
    # The one driver that hands every call with all its arguments to the one below.
    inner = file_system.fs if type(file_system) is DirFileSystem else file_system
    return inherits_exclusive_create(type(inner))


def inherits_exclusive_create(driver: type[fsspec.AbstractFileSystem]) -> bool:
    """Return whether the class that wrote the `pipe_file` of a driver is one that is accepted."""
    author = next(each for each in driver.__mro__ if _METHODS.intersection(vars(each)))
    return author is MemoryFileSystem or author.__module__.partition(".")[0] in _PACKAGES


def create(file_system: fsspec.AbstractFileSystem, path: str, content: bytes) -> None:
    """Write a file if nothing is there. Raises whatever the driver raises; only a read tells what happened."""
    inner = file_system.fs if isinstance(file_system, DirFileSystem) else file_system
    if not isinstance(inner, MemoryFileSystem):
        file_system.pipe_file(path, content, mode="create")
        return
    # It looks and then writes, too. But it belongs to this process, so a lock makes one step of it.
    with _in_memory:
        file_system.pipe_file(path, content, mode="create")
