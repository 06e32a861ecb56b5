"""Objects as Arrow sees files: mapped where they are local, read range by range where they are not."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from datasvc.errors import CorruptDataError, DatasvcError, NotFoundError
from datasvc.repository import Digest, Objects, Storage
from datasvc.repository.store.retries import map_exceptions

_TAIL_BYTES: Final = 16 << 10


class ObjectFiles:
    """The objects of a repository as files named by their digest, for Arrow's own readers.

    Only the ranges that a reader asks for are read, so they cannot be checked against the digest; sizes are.

    Args:
        storage: the repository's tree.
        sizes: bytes of each object, as its table says.

    Attributes:
        failure: the first error of ours that reading met; other libraries pass on its text alone.
    """

    def __init__(self, storage: Storage, sizes: Mapping[Digest, int]) -> None:
        self.failure: DatasvcError | None = None
        self._storage = storage
        self._sizes = sizes

    def open(self, digest: Digest) -> pa.NativeFile:
        """Open an object. Raises NotFoundError, CorruptDataError (of another size), UnavailableError."""
        try:
            return self._open(digest)
        except DatasvcError as error:
            self.failure = self.failure or error
            raise

    def _open(self, digest: Digest) -> pa.NativeFile:
        path = Objects.path(digest)
        where, expected = self._storage.location(path), self._sizes[digest]
        size_bytes = self._storage.size(path)
        if size_bytes is None:
            raise NotFoundError(f"shard {where} is missing; restore it from another copy")
        if size_bytes != expected:
            raise CorruptDataError(
                f"shard {where} is corrupt: {size_bytes} bytes long, expected {expected}; "
                "restore it from another copy"
            )
        local = self._storage.local_path(path)
        if local is None:
            return pa.PythonFile(_RangedFile(self, path, size_bytes), mode="r")
        with map_exceptions("map", where):
            return pa.memory_map(str(local))

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Return a part of an object. Raises as `Storage.read_range`."""
        try:
            return self._storage.read_range(path, offset, length)
        except DatasvcError as error:
            self.failure = self.failure or error
            raise


class _RangedFile:
    """A remote object as a seekable file; used by one thread at a time."""

    closed = False

    def __init__(self, files: ObjectFiles, path: str, size_bytes: int) -> None:
        self._files = files
        self._path = path
        self._size_bytes = size_bytes
        self._offset = 0
        self._tail: bytes | None = None

    def read(self, length: int = -1) -> bytes:
        left = max(self._size_bytes - self._offset, 0)
        length = left if length < 0 else min(length, left)
        content = self._read(length) if length else b""
        self._offset += len(content)
        return content

    def _read(self, length: int) -> bytes:
        tail_start = max(self._size_bytes - _TAIL_BYTES, 0)
        if self._offset < tail_start:
            return self._files.read_range(self._path, self._offset, length)
        # Opening an IPC file takes several small reads at its end: one request answers them all.
        if self._tail is None:
            self._tail = self._files.read_range(self._path, tail_start, self._size_bytes - tail_start)
        return self._tail[self._offset - tail_start :][:length]

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._size_bytes}[whence]
        self._offset = start + offset
        return self._offset

    def tell(self) -> int:
        return self._offset

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True
