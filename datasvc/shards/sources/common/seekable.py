"""A file of a source as Arrow reads it at any offset."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa

from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.sources.common.files import FileReader

_BLOCK_BYTES: Final = 1 << 20
_BLOCKS_KEPT: Final = 8


@contextmanager
def open_seekable(reader: FileReader, path: str) -> Iterator[pa.NativeFile]:
    """Open a file, not decompressed. Of a remote one some blocks are kept and the next is read ahead.

    Raises:
        NotFoundError, UnavailableError: also by reading from it.
    """
    location = reader.location(path)
    with map_exceptions("open", location):
        if reader.is_local:
            opened = pa.OSFile(path)
        else:
            remote = reader.file_system.open(
                path,
                "rb",
                block_size=_BLOCK_BYTES,
                cache_type="background",
                cache_options={"maxblocks": _BLOCKS_KEPT},
            )
            opened = pa.PythonFile(_Translated(remote, location), mode="r")
    with opened:
        yield opened


class _Translated(io.RawIOBase):
    """An open remote file whose errors are ours."""

    def __init__(self, file: Any, location: str) -> None:
        self._file, self._location = file, location

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        with map_exceptions("read", self._location):
            return bytes(self._file.read(size))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
