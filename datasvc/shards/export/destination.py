"""The destination of an export, a local folder or any fsspec URL. The export formats write their files to it.

Each file is complete or absent, so an interrupted export can continue after its last complete file.
"""

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
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.retries import map_exceptions


class Destination:
    """The folder of an export. File names are paths relative to this folder, with forward slashes.

    Args:
        url: local folder or any fsspec URL.

    Raises:
        ConfigError: no driver for the URL is installed.
    """

    def __init__(self, url: str) -> None:
        self.storage = Storage(url)
        self.is_local = self.storage.is_local

    @property
    def location(self) -> str:
        """The URL for messages, without credentials."""
        return redact_url(self.storage.url)

    @property
    def folder(self) -> Path:
        """The local folder. Raises ConfigError: the destination is not local."""
        folder = self.storage.local_path("")
        if folder is None:
            raise ConfigError(
                f"{self.location} is not a local folder; export into a local folder, and upload it afterwards"
            )
        return folder

    def put(self, name: str, content: bytes | memoryview) -> int:
        """Write a complete file; return its size in bytes. For errors, see `writing`."""
        self.storage.put_bytes(name, content)
        return memoryview(content).nbytes

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for writing. It appears at the destination only if the `with` block ends without an error.

        Raises:
            ConfigError: writing is not permitted.
            UnavailableError: the store failed, or the disk is full.
        """
        path = self.storage.local_path(name)
        with map_exceptions("write", self.storage.location(name)):
            if path is not None:
                durable.make_folder(path.parent)
                with durable.replacing(path) as file:
                    yield file
                return
        # A remote store accepts only complete files, so the content is collected in a local file first.
        with tempfile.TemporaryDirectory(prefix="datasvc-export-") as folder:
            local_file = Path(folder) / "complete"
            with map_exceptions("write", str(local_file)), local_file.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # a full disk may be reported only here
            self.storage.adopt(name, local_file)

    def sweep(self) -> None:
        """Remove the temporary files of an interrupted export. For errors, see `writing`."""
        # Only local files have a temporary name while they are written; a remote store gets complete files.
        if not self.is_local:
            return
        with map_exceptions("clean up", self.location):
            for path in sorted(self.folder.rglob(f"{durable.TEMPORARY_PREFIX}*")):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
