"""Where a staged file has its own name, and what its bytes were when they arrived: `CACHE/links/`."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final

from datasvc import durable
from datasvc.repository import Digest
from datasvc.repository.objects import parse_digest

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
        """The digest that its bytes had on arrival; None where the object is no staged file."""
        with suppress(FileNotFoundError):
            return parse_digest((self._folder / _CONTENT).read_text(encoding="ascii"))
        return None

    def note(self, content: Digest) -> None:
        """Write down the digest of its bytes. Raises OSError."""
        durable.make_folder(self._folder)
        durable.write_file(self._folder / _CONTENT, content.encode())

    def make(self, name: str) -> Path:
        """Return the path under which the file has its own name. Raises OSError."""
        path = self._folder / name
        if not path.is_symlink():
            # Another process may be making the same link: both give it in one piece.
            temporary = self._folder / f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(8)}"
            os.symlink(self._target, temporary)
            temporary.rename(path)
        return path

    def remove(self) -> None:
        """Forget the file."""
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                path.unlink(missing_ok=True)
            self._folder.rmdir()
