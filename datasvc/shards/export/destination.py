"""The destination of an export, a local folder or any fsspec URL. The export formats write their files to it.

Each file is complete or absent, so an interrupted export can continue after its last complete file.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from blake3 import blake3

from datasvc import durable
from datasvc.errors import ConfigError
from datasvc.repository import Storage
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.retries import map_exceptions

_UNSAFE: Final = re.compile(r'[\x00-\x1f\x7f%/\\:*?"<>|]|^\.|[. ]$')
# File systems allow 255 bytes per name; the other 55 bytes are left for what a format adds, such as an extension.
_MAX_PART_BYTES: Final = 200
_MAX_PATH_BYTES: Final = 1000
# A shortened name keeps this many bytes of the name, so that it stays readable. The result fits into a part even if
# each of these bytes is percent-encoded as three bytes.
_KEPT_BYTES: Final = 50
# Extension by the first bytes of a file.
_MAGIC: Final = {b"\xff\xd8\xff": "jpg", b"\x89PNG\r\n": "png", b"GIF8": "gif", b"BM": "bmp"}
# All extensions of an image format, by the usual extension of the format.
_SPELLINGS: Final = {
    "jpg": ("jpg", "jpeg", "jpe"),
    "png": ("png",),
    "gif": ("gif",),
    "bmp": ("bmp",),
    "webp": ("webp",),
    "tif": ("tif", "tiff"),
}


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


# Characters that are special in a file system, a URL or a shell are percent-encoded: each byte of their UTF-8 becomes
# %XX. A `%` without two hexadecimal digits after it marks an empty part of a path, or a name that was shortened.


def safe_part(text: str) -> str:
    """Return `text` as one part of a path: without slashes, not hidden, at most 200 bytes."""
    return _cut(_UNSAFE.sub(percent_encoded, text) or "%", _MAX_PART_BYTES)


def safe_path(key: str) -> str:
    """Return a key as a relative path; slashes separate folders, and each part is encoded by `safe_part`."""
    return _cut("/".join(safe_part(part) for part in key.split("/")), _MAX_PATH_BYTES)


def percent_encoded(match: re.Match[str]) -> str:
    """Return the bytes of a match, each as %XX."""
    return "".join(f"%{byte:02X}" for byte in match[0].encode())


def image_extension(blob: Any) -> str | None:
    """Return the usual extension of an encoded image, such as "jpg"; None if `blob` has no known image format."""
    start = bytes(memoryview(blob)[:16])
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "webp"
    if start[:4] in {b"II*\0", b"MM\0*"}:
        return "tif"
    return next((extension for magic, extension in _MAGIC.items() if start.startswith(magic)), None)


def split_extension(key: str, extension: str | None) -> tuple[str, str]:
    """Split a key into its stem and its extension; an extension counts only if it is a spelling of `extension`.

    `("a/1.JPEG", "jpg")` gives `("a/1", "JPEG")`; `("a/1.0", "jpg")` gives `("a/1.0", "")`.
    """
    stem, dot, key_extension = key.rpartition(".")
    base = stem.rpartition("/")[2]
    if dot and base and extension is not None and key_extension.lower() in _SPELLINGS[extension]:
        return stem, key_extension
    return key, ""


def _cut(name: str, limit_bytes: int) -> str:
    """Return `name`, shortened if it has more than `limit_bytes` bytes."""
    raw = name.encode()
    if len(raw) <= limit_bytes:
        return name
    # The digest keeps shortened names different. Only `safe_path` passes slashes: a shortened path is one part.
    kept = raw[:_KEPT_BYTES].decode(errors="ignore").replace("/", "%2F")
    # Remove an incomplete "%XX" at the end: its `%` would look like the mark of a shortened name.
    return f"{re.sub('%[0-9A-F]?$', '', kept)}%~{blake3(raw).hexdigest(16)}"
