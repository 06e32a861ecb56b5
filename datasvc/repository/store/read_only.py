"""`ReadOnlyStorage`: a storage that refuses every write, for programs that only show what is there."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from datasvc.errors import ConfigError
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.storage import Storage


class ReadOnlyStorage(Storage):
    """A storage that is read only: each method that would write, rename or delete a file raises ConfigError."""

    def check_writable(self) -> None:
        """Raise ConfigError: `create` and `create_temporary` call it."""
        self._refuse()

    def remove_temporary(self, path: str) -> None:  # noqa: ARG002
        """Raise ConfigError."""
        self._refuse()

    def put_bytes(self, path: str, content: bytes | memoryview, *, synced: bool = True) -> None:  # noqa: ARG002
        """Raise ConfigError."""
        self._refuse()

    def refresh(self, path: str, size_bytes: int) -> bool:  # noqa: ARG002
        """Raise ConfigError: the age of a local file would be reset."""
        self._refuse()

    def delete_if_older(self, path: str, before_s: float) -> bool:  # noqa: ARG002
        """Raise ConfigError."""
        self._refuse()

    def delete_folder(self, folder: str) -> None:  # noqa: ARG002
        """Raise ConfigError."""
        self._refuse()

    def adopt(self, path: str, finished: Path) -> None:  # noqa: ARG002
        """Raise ConfigError."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError(f"{redact_url(self.url)} was opened read-only; open the repository without read_only=True")
