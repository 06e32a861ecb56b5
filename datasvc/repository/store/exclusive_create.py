"""Creates files atomically, only if they do not exist, as every commit needs; and lists the drivers that can do it.

fsspec's base class implements `pipe_file(mode="create")` as `exists()` followed by a write. Two writers can both find
no file, and then one overwrites the entry of the other. A test with one writer does not detect this. So a driver is
accepted only if it inherits its `pipe_file` from a class whose source code is known to be atomic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

from datasvc.errors import ConfigError, ConflictError, NotFoundError, UnavailableError, UnknownOutcomeError
from datasvc.repository.store.redaction import redact_text, safe_cause

# fsspec is imported for a store that needs it: it takes as long as Python itself to start.
if TYPE_CHECKING:
    import fsspec

WRITABLE_STORES: Final = (
    "a local folder, S3 or a compatible store (s3://), Google Cloud Storage (gs://), Azure Blob Storage "
    "(abfs://) or memory://"
)
# Drivers whose write requests carry a condition: If-None-Match for S3 and Azure, ifGenerationMatch for Google.
# `Repository.create` checks that the store respects this condition.
_PACKAGES: Final = frozenset({"adlfs", "gcsfs", "s3fs"})
# A driver defines one of these methods; fsspec derives `pipe_file` from an asynchronous `_pipe_file`.
_METHODS: Final = frozenset({"pipe_file", "_pipe_file"})

_memory_lock = threading.Lock()


def creates_exclusively(file_system: fsspec.AbstractFileSystem) -> bool:
    """Return whether `create` is known to be atomic on this file system."""
    from fsspec.implementations.dirfs import DirFileSystem

    # DirFileSystem passes every call with all its arguments to the wrapped driver. Other wrappers and subclasses may
    # not do so.
    inner = file_system.fs if type(file_system) is DirFileSystem else file_system
    return inherits_exclusive_create(type(inner))


def inherits_exclusive_create(driver: type[fsspec.AbstractFileSystem]) -> bool:
    """Return whether a driver inherits its `pipe_file` from an accepted class, and does not override it."""
    from fsspec.implementations.memory import MemoryFileSystem

    definer = next(base for base in driver.__mro__ if _METHODS.intersection(vars(base)))  # the nearest base class
    return definer is MemoryFileSystem or definer.__module__.partition(".")[0] in _PACKAGES


def create(file_system: fsspec.AbstractFileSystem, path: str, content: bytes) -> None:
    """Write a file only if `path` does not exist. Exceptions of the driver are not converted.

    The file may exist even after an exception, so the caller must then read it.
    """
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.memory import MemoryFileSystem

    inner = file_system.fs if isinstance(file_system, DirFileSystem) else file_system
    # The memory driver is not atomic. But its files exist only in this process, so a lock is enough.
    lock: AbstractContextManager[object] = _memory_lock if isinstance(inner, MemoryFileSystem) else nullcontext()
    with lock:
        file_system.pipe_file(path, content, mode="create")


def create_and_read_back(
    create_file: Callable[[], object], read: Callable[[], bytes], content: bytes, location: str
) -> None:
    """Create a file in a remote store, and read it to find out whether this call has written it.

    Args:
        create_file: function that creates the file with `content` if it does not exist; it may raise any exception.
        read: function that reads the file, with the errors of `map_exceptions`.
        content: bytes that no other writer writes.
        location: URL of the file for messages.

    Raises:
        ConflictError, UnavailableError, UnknownOutcomeError: see `Storage.create`.
    """
    failure: Exception | None = None
    try:
        create_file()
    except Exception as error:  # noqa: BLE001 - after any error, only a read shows the outcome
        failure = error
    # Read even after a success: a store may ignore the condition and report success to two writers.
    stored = read_back(read, location, failure)
    if stored == content:
        return
    if stored is not None:
        raise ConflictError(f"{location} exists already") from (failure and safe_cause(failure))
    reason = redact_text(str(failure)) if failure else "it does not exist after the write"
    raise UnavailableError(f"cannot create {location}: {reason}") from (failure and safe_cause(failure))


def read_back(read: Callable[[], bytes], location: str, failure: Exception | None) -> bytes | None:
    """Return the content of a file after a create, None if there is no file; `failure`: error of the create, if any.

    Raises UnknownOutcomeError if the file cannot be read.
    """
    try:
        return read()
    except NotFoundError:
        return None
    except (UnavailableError, ConfigError) as error:
        raise UnknownOutcomeError(
            f"creating {location} failed with {redact_text(repr(failure))}, and so did the read that shows whether "
            f"it exists: {error}; read the log before you try again"
        ) from error
