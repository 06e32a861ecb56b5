"""Links that give staged files their original names, and records of the digests of their contents: `CACHE/links/`.

A staged file is a remote file that was fetched by its URL, see `staged_files`. Its object is not named by the digest
of its content, so a scrub or a restart verifies the object by the recorded digest.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from datasvc import durable
from datasvc.errors import ConfigError, CorruptDataError
from datasvc.repository import Digest
from datasvc.repository.objects.objects import parse_digest

_CONTENT: Final = ".content"


class FileLink:
    """The link of one staged file.

    CACHE/links/3fa9.../.content     digest of the content
    CACHE/links/3fa9.../model.bin    symbolic link to the object

    Args:
        folder: folder of the cache.
        digest: name of the file's object, which is not the digest of its content.
    """

    def __init__(self, folder: Path, digest: Digest) -> None:
        self._folder = folder / "links" / parse_digest(digest)
        self._target = Path("..", "..", "objects", digest[:2], digest)

    @property
    def content_digest(self) -> Digest | None:
        """Digest of the content when it arrived; None if the object is not a staged file.

        Also None if the recorded digest is damaged: the object then counts as corrupt, and is fetched again.
        """
        path = self._folder / _CONTENT
        # An earlier version of datasvc created a symbolic link of this name for a staged file called ".content".
        with suppress(FileNotFoundError, UnicodeDecodeError, CorruptDataError):
            return None if path.is_symlink() else parse_digest(path.read_text(encoding="ascii"))
        return None

    def record_content(self, content_digest: Digest) -> None:
        """Record the digest of the content. Raises OSError."""
        durable.make_folder(self._folder)
        durable.write_file(self._folder / _CONTENT, content_digest.encode())

    def make(self, name: str) -> Path:
        """Create the link if it is missing, and return its path. No existing file is ever replaced.

        Raises:
            ConfigError: `name` is not a plain file name, or another file has it.
            OSError: the link cannot be created.
        """
        path = self._folder / name
        if not durable.is_plain_name(name):
            raise ConfigError(
                f"cannot link the staged file as {name[:80]!r} in {self._folder}: this is not a plain file name; "
                "copy the file to a name of 1 to 255 bytes without a leading dot, slash or control characters"
            )
        try:
            os.symlink(self._target, path)
        except FileExistsError:
            # Another process may have created the same link a moment ago.
            if not (path.is_symlink() and path.readlink() == self._target):
                raise ConfigError(
                    f"cannot link the staged file as {path}: expected a link to {self._target} or nothing, found "
                    "another file; remove it, then stage the file again"
                ) from None
        return path

    def remove(self) -> None:
        """Remove the link and the recorded digest."""
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                path.unlink(missing_ok=True)
            self._folder.rmdir()
