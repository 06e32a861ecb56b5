"""Open a file of a source for random access by Arrow, which reads Parquet and IPC files by their footers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa

from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.streams import WrappingStream

_BLOCK_BYTES: Final = 1 << 20
_BLOCKS_KEPT: Final = 8


@contextmanager
def open_seekable(reader: FileReader, path: str) -> Iterator[pa.NativeFile]:
    """Open a file without decompression. For a remote file, blocks are cached and the next one is read ahead.

    Raises:
        NotFoundError: there is no such file; also raised by reads.
        UnavailableError: the store does not respond; also raised by reads.
    """
    location = reader.location(path)
    with map_exceptions("open", location):
        if reader.is_local:
            opened = pa.OSFile(path)
        else:
            # Several blocks are kept, since Arrow reads several columns in turn, each at its own offset.
            remote = reader.file_system.open(
                path,
                "rb",
                block_size=_BLOCK_BYTES,
                cache_type="background",
                cache_options={"maxblocks": _BLOCKS_KEPT},
            )
            opened = pa.PythonFile(_ErrorMappingFile(remote, location), mode="r")
    with opened:
        yield opened


class _ErrorMappingFile(WrappingStream):
    """An open remote file whose errors are mapped to those of datasvc."""

    def __init__(self, file: Any, location: str) -> None:
        super().__init__(file)
        self._location = location

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        with map_exceptions("read", self._location):
            return bytes(self._wrapped.read(size))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._wrapped.seek(offset, whence))

    def tell(self) -> int:
        return int(self._wrapped.tell())
