"""Where a staged file has its own name, and what its bytes were when they arrived: `CACHE/links/`."""

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

    CACHE/links/3fa9.../.content     digest of its bytes
    CACHE/links/3fa9.../model.bin    a link to the object

    Args:
        folder: of the cache.
        digest: the name of its object.
    """

    def __init__(self, folder: Path, digest: Digest) -> None:
        self._folder = folder / "links" / parse_digest(digest)
        self._target = Path("..", "..", "objects", digest[:2], digest)

    @property
    def content(self) -> Digest | None:
        """The digest that its bytes had on arrival; None where the object is no staged file.

        None also where the file with the digest is damaged: then the object counts as changed, and is fetched again.
        """
        path = self._folder / _CONTENT
        with suppress(FileNotFoundError, UnicodeDecodeError, CorruptDataError):
            return None if path.is_symlink() else parse_digest(path.read_text(encoding="ascii"))
        return None

    def note(self, content: Digest) -> None:
        """Write down the digest of its bytes. Raises OSError."""
        durable.make_folder(self._folder)
        durable.write_file(self._folder / _CONTENT, content.encode())

    def make(self, name: str) -> Path:
        """Return the path under which the file has its own name, which is made unless it is there.

        Raises:
            ConfigError: the name is not plain, or something else than this link has it; nothing is ever replaced.
            OSError: the link cannot be made.
        """
        path = self._folder / name
        if not durable.is_plain_name(name):
            raise ConfigError(
                f"cannot link the staged file as {name[:80]!r} in {self._folder}: no plain name of a file"
            )
        try:
            os.symlink(self._target, path)
        except FileExistsError:
            # Another process may have made the same link a moment ago.
            if not (path.is_symlink() and path.readlink() == self._target):
                raise ConfigError(
                    f"cannot link the staged file as {path}: expected a link to {self._target} or nothing, found "
                    "something else; remove it, then stage the file again"
                ) from None
        return path

    def remove(self) -> None:
        """Forget the file."""
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                path.unlink(missing_ok=True)
            self._folder.rmdir()
