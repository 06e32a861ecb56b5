"""Creates the folder of an export atomically: it exists with all its files, or not at all."""

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
def create_folder(folder: Path) -> Iterator[Path]:
    """Create and yield a temporary folder next to `folder`; rename it to `folder` if the `with` block succeeds.

    The `with` block must sync the files that it writes. If the process is killed in this block, a folder `.tmp-...`
    remains.

    Raises:
        ConfigError: `folder` is a file, is not empty, or is not writable.
        UnavailableError: the disk is full or fails.
    """
    target = check_target(folder)
    with map_exceptions("write", str(folder)):
        durable.make_folder(target.parent)
        temporary = target.with_name(f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(8)}")
        temporary.mkdir()
        try:
            yield temporary
            # Publish after fsync: a power cut must not leave a visible folder without its files.
            durable.fsync_folder(temporary)
            # The rename replaces `folder` if it is empty. It fails if another process has written files into it.
            os.rename(temporary, target)
            durable.fsync_folder(target.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def check_target(folder: Path) -> Path:
    """Check that `create_folder` can create a folder, and return its path with symbolic links resolved.

    Call this before a download for the folder starts, so that an error is raised early.

    Raises:
        ConfigError: `folder` is a file, is not empty, cannot be replaced, or its parent folder is not writable.
        UnavailableError: the disk fails.
    """
    with map_exceptions("write", str(folder)):
        target = Path(os.path.realpath(folder))
        if target.exists() and not target.is_dir():
            raise ConfigError(f"cannot write {folder}: it is a file; name a new folder")
        if target.exists() and any(target.iterdir()):
            raise ConfigError(f"{folder} is not empty; name a new folder, nothing is overwritten")
        # The final rename replaces an empty folder, but it cannot replace a mount point or the working folder.
        if os.path.ismount(target):
            raise ConfigError(f"{folder} is a mount point; name a new folder in it")
        if target == Path.cwd():
            raise ConfigError(f"{folder} is the working folder; name a new folder in it")
        parent = next(folder_above for folder_above in target.parents if folder_above.exists())
        if not parent.is_dir():
            raise ConfigError(f"cannot write {folder}: {parent} is a file; name a new folder")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise ConfigError(f"cannot write {folder}: {parent} is not writable; name another folder")
    return target
