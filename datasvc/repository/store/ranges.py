"""Ranges of the files of one store, gathered in memory or handed on as they arrive."""

from __future__ import annotations

from typing import Final

import fsspec

from datasvc.errors import UnavailableError
from datasvc.repository.store.cancellation import CancellationToken
from datasvc.repository.store.http_stream import HttpStream, Take, UnsuitedError
from datasvc.repository.store.retries import with_retries

_GATHERED_BYTES: Final = 16 << 20


class RangeReader:
    """Reads ranges. Safe for threads.

    Args:
        file_system: of the store.
    """

    def __init__(self, file_system: fsspec.AbstractFileSystem) -> None:
        self._fs = file_system
        self._http = HttpStream.of(file_system)

    @property
    def can_stream(self) -> bool:
        """Whether `stream` needs little memory, so that ranges may be long. It may become False."""
        return self._http is not None

    def read(self, path: str, offset: int, length: int, *, location: str) -> bytes:
        """Return `length` bytes from `offset`; fewer where the content ends. Raises as `retries.ask`."""
        return with_retries(
            self._fs, "read", location, lambda: bytes(self._fs.cat_file(path, start=offset, end=offset + length))
        )

    def stream(
        self, path: str, offset: int, length: int, take: Take, *, location: str, interrupt: CancellationToken
    ) -> None:
        """Hand exactly `length` bytes from `offset` to `take`, in order, from the calling thread.

        Args:
            path: as the file system takes it.
            offset: in the file.
            length: may be 0.
            take: gets the bytes; what it raises passes through.
            location: `path` for messages.
            interrupt: ends it.

        Raises:
            NotFoundError, ConfigError, UnavailableError: as `retries.ask`; interrupted, or too few bytes, too.
        """
        http = self._http
        if http is not None and length:
            try:
                http.read(path, offset, length, take, location=location, interrupt=interrupt)
            except UnsuitedError:
                self._http = None
            else:
                return
        for start in range(offset, offset + length, _GATHERED_BYTES):
            wanted = min(_GATHERED_BYTES, offset + length - start)
            if interrupt.is_set:
                raise UnavailableError(f"cannot read {location}: nobody waits for it any more")
            content = self.read(path, start, wanted, location=location)
            if len(content) != wanted:
                raise UnavailableError(f"cannot read {location}: {len(content)} of {wanted} bytes came")
            take(memoryview(content))
