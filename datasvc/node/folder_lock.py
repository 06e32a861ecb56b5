"""Lock that allows one `datasvc serve` per cache folder; the kernel releases it whenever the process ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datasvc.errors import ConfigError

_NAME = "serve.lock"


@contextmanager
def lock_for_serving(folder: Path) -> Iterator[None]:
    """Hold the server lock of a cache folder while the block runs.

    Raises:
        ConfigError: another process serves the folder, or its file system has no locks.
    """
    path = folder / _NAME
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot lock {path}: {error}; check the permissions of the cache folder") from error
    try:
        _lock(descriptor, path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        # The file stays: if it were removed, two servers could lock two files of the same name.
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        raise ConfigError(
            f"process {holder} already serves the cache {path.parent} (it holds {path.name}); stop it first, or "
            "use another cache folder"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot lock {path}: {error}; put the cache on a local disk with file locks") from error
