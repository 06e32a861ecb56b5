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
from datasvc.repository.asking import translated


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """Open a temporary folder beside `folder` that becomes it once the block ends well.

    Files in it are synced by whoever writes them; a killed writer leaves a folder `.tmp-...` and nothing else.

    Raises:
        ConfigError: `folder` is a file or has something in it, or may not be written.
        UnavailableError: the disk is full, or fails.
    """
    with translated("write", str(folder)):
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"cannot write {folder}: it is a file; name a new folder")
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; name a new folder, nothing is overwritten")
        durable.make_folder(folder.absolute().parent)
        temporary = folder.absolute().with_name(f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(8)}")
        temporary.mkdir()
        try:
            yield temporary
            durable.fsync_folder(temporary)
            # Replaces an empty folder, and fails where somebody filled it meanwhile.
            os.rename(temporary, folder)
            durable.fsync_folder(folder.absolute().parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
