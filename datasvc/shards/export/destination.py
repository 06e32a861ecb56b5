"""Where an export goes: a local folder or any fsspec URL, in which each file is whole or absent."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from datasvc import durable
from datasvc.errors import ConfigError
from datasvc.repository import Storage
from datasvc.repository.store.retries import map_exceptions
from datasvc.repository.store.storage import redact_url


class Destination:
    """A folder that is being filled. Names in it are relative, with forward slashes.

    Args:
        url: a local folder or any fsspec URL.

    Raises:
        ConfigError: no driver for the URL.
    """

    def __init__(self, url: str) -> None:
        self.storage = Storage(url)

    @property
    def is_local(self) -> bool:
        """Whether it lies on a file system of this machine."""
        return self.storage.is_local

    @property
    def is_in_memory(self) -> bool:
        """Whether only this process sees it."""
        return self.storage.url.startswith("memory:")

    @property
    def location(self) -> str:
        """Return where it is, for messages: without credentials."""
        return redact_url(self.storage.url)

    @property
    def folder(self) -> Path:
        """The local folder. Raises ConfigError for other destinations."""
        folder = self.storage.local_path("")
        if folder is None:
            raise ConfigError(f"{self.location} is no local folder; name one, and upload it afterwards")
        return folder

    def put(self, name: str, content: bytes | memoryview) -> int:
        """Write a file whole; returns its size in bytes. Raises ConfigError, UnavailableError."""
        self.storage.put_bytes(name, content)
        return memoryview(content).nbytes

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Open a file of any size that is there, whole, once the block ends well, and never else.

        Raises:
            ConfigError: not allowed there.
            UnavailableError: the store failed, or the disk is full.
        """
        path = self.storage.local_path(name)
        with map_exceptions("write", self.storage.location(name)):
            if path is not None:
                durable.make_folder(path.parent)
                with durable.replacing(path) as file:
                    yield file
                return
        with tempfile.TemporaryDirectory(prefix="datasvc-export-") as folder:
            whole = Path(folder) / "whole"
            with map_exceptions("write", str(whole)), whole.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            self.storage.adopt(name, whole)

    def sweep(self) -> None:
        """Remove the temporary files that a killed export left. Raises UnavailableError."""
        if not self.is_local:
            return
        with map_exceptions("sweep", self.location):
            for path in sorted(self.folder.rglob(f"{durable.TEMPORARY_PREFIX}*")):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
