"""One `datasvc serve` per cache folder: a lock that the kernel frees when the process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datasvc.errors import ConfigError

_NAME = "serve.lock"


@contextmanager
def only_server_of(folder: Path) -> Iterator[None]:
    """Keep a cache folder locked for serving while the block runs.

    Raises:
        ConfigError: another process serves it, or the folder has no locks.
    """
    path = folder / _NAME
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot lock {path}: {error}") from error
    try:
        _lock(descriptor, path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        # The file stays: removing it would let two servers lock two files of one name.
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        raise ConfigError(
            f"process {holder} serves the cache {path.parent} already (it holds {path.name}); stop it first, or "
            "give this one a folder of its own"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot lock {path}: {error}; put the cache on a local disk with file locks") from error
