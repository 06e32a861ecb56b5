"""A folder that is there with all its files, or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datasvc import durable
from datasvc.errors import ConfigError
from datasvc.repository.store.retries import map_exceptions


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """Open a temporary folder beside `folder` that becomes it once the block ends well.

    Files in it are synced by whoever writes them; a killed writer leaves a folder `.tmp-...` and nothing else.

    Raises:
        ConfigError: `folder` is a file or has something in it, or may not be written.
        UnavailableError: the disk is full, or fails.
    """
    target = check_target(folder)
    with map_exceptions("write", str(folder)):
        durable.make_folder(target.parent)
        temporary = target.with_name(f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(8)}")
        temporary.mkdir()
        try:
            yield temporary
            durable.fsync_folder(temporary)
            # Replaces an empty folder, and fails where somebody filled it meanwhile.
            os.rename(temporary, target)
            durable.fsync_folder(target.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def check_target(folder: Path) -> Path:
    """Return the folder that `filling` would make, links followed: for a look at it before anything is downloaded.

    Raises:
        ConfigError: it is a file, has something in it, cannot be replaced, or its folder may not be written to.
        UnavailableError: the disk fails.
    """
    with map_exceptions("write", str(folder)):
        target = Path(os.path.realpath(folder))
        if target.exists() and not target.is_dir():
            raise ConfigError(f"cannot write {folder}: it is a file; name a new folder")
        if target.exists() and any(target.iterdir()):
            raise ConfigError(f"{folder} is not empty; name a new folder, nothing is overwritten")
        # A new folder takes its place once all is written, which neither of these lets happen.
        if os.path.ismount(target):
            raise ConfigError(f"{folder} is where a file system is mounted; name a new folder in it")
        if target == Path.cwd():
            raise ConfigError(f"{folder} is the working folder; name a new folder in it")
        above = next(each for each in target.parents if each.exists())
        if not above.is_dir():
            raise ConfigError(f"cannot write {folder}: {above} is a file; name a new folder")
        if not os.access(above, os.W_OK | os.X_OK):
            raise ConfigError(f"cannot write {folder}: nothing may be written to {above}; name another folder")
    return target
