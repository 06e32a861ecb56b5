"""Stored objects as files for Arrow's own readers: local ones are mapped, remote ones are read by byte range.

SQL queries and scans use these files to read only some columns of a shard, and `verify` to read only metadata.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import pyarrow as pa

from datasvc.errors import CorruptDataError, DatasvcError, NotFoundError
from datasvc.repository import Digest, Objects, Storage
from datasvc.repository.objects.in_place import built_file
from datasvc.repository.store.retries import map_exceptions

# One request reads this many bytes at the end of a file. Elsewhere, the last read is kept if it is not larger.
_TAIL_BYTES: Final = 16 << 10


class ObjectFiles:
    """The objects of a repository as files, opened by digest.

    Sizes are checked. Contents are not checked against the digest, because only requested ranges are read.

    Args:
        storage: storage of the repository.
        sizes: expected size of each object in bytes.
        builds: whether to build attached shards, which reads them whole.

    Attributes:
        failure: the first datasvc error that an open or a read raised. It is kept here because a library that calls
            Arrow, such as DuckDB, passes on only the text of an error.
    """

    def __init__(self, storage: Storage, sizes: Mapping[Digest, int], *, builds: bool = True) -> None:
        self._builds = builds
        self.failure: DatasvcError | None = None
        self._storage = storage
        self._sizes = sizes

    def open(self, digest: Digest) -> pa.NativeFile:
        """Open an object. Raise NotFoundError, CorruptDataError (its size is wrong), those of `build_object`."""
        path = Objects.path(digest)
        location, expected = self._storage.location(path), self._sizes[digest]
        with self._recording_failure():
            size_bytes = self._storage.size(path)
            if size_bytes is None and self._builds:
                with built_file(Objects(self._storage), digest) as built:
                    if built is not None:
                        return pa.memory_map(built)
            if size_bytes is None:
                raise NotFoundError(f"shard {location} is missing; restore it from another copy")
            if size_bytes != expected:
                raise CorruptDataError(
                    f"shard {location} is corrupt: it has {size_bytes} bytes, expected {expected}; "
                    "restore it from another copy"
                )
            local = self._storage.local_path(path)
            if local is None:
                return pa.PythonFile(_RangedFile(self, path, size_bytes), mode="r")
            with map_exceptions("map", location):
                return pa.memory_map(str(local))

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Return a range of an object's bytes. Raise what `Storage.read_range` raises."""
        with self._recording_failure():
            return self._storage.read_range(path, offset, length)

    @contextmanager
    def _recording_failure(self) -> Iterator[None]:
        try:
            yield
        except DatasvcError as error:
            self.failure = self.failure or error
            raise


class _RangedFile:
    """A remote object with the methods of a file that `pa.PythonFile` calls; for use by one thread at a time."""

    closed = False  # Arrow reads this attribute

    def __init__(self, files: ObjectFiles, path: str, size_bytes: int) -> None:
        self._files = files
        self._path = path
        self._size_bytes = size_bytes
        self._offset = 0
        self._tail: bytes | None = None
        self._last_read = (0, b"")  # offset and bytes of the last read before the tail; no bytes if it was large

    def read(self, length: int = -1) -> bytes:
        remaining = max(self._size_bytes - self._offset, 0)
        length = remaining if length < 0 else min(length, remaining)
        content = self._read(length) if length else b""
        self._offset += len(content)
        return content

    def _read(self, length: int) -> bytes:
        """Return `length` bytes at the present offset, from an earlier request if possible."""
        tail_start = max(self._size_bytes - _TAIL_BYTES, 0)
        if self._offset < tail_start:
            # The metadata of a record batch is read twice in succession: by `IpcReader.check`, then by Arrow.
            if (self._last_read[0], len(self._last_read[1])) == (self._offset, length):
                return self._last_read[1]
            content = self._files.read_range(self._path, self._offset, length)
            self._last_read = (self._offset, content if length <= _TAIL_BYTES else b"")
            return content
        # Arrow opens an IPC file with several small reads at its end: one request serves all of them.
        if self._tail is None:
            self._tail = self._files.read_range(self._path, tail_start, self._size_bytes - tail_start)
        return self._tail[self._offset - tail_start :][:length]

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._size_bytes}[whence]
        self._offset = start + offset
        return self._offset

    def tell(self) -> int:
        return self._offset

    def close(self) -> None:
        self.closed = True
