"""Objects as Arrow sees files: mapped where they are local, read range by range where they are not."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.fs as arrow_fs

from datasvc.errors import CorruptDataError, DatasvcError, NotFoundError
from datasvc.repository import Digest, Objects, Storage
from datasvc.repository.asking import translated


class ObjectFiles(arrow_fs.FileSystemHandler):  # type: ignore[misc]
    """The objects of a repository as files named by their digest, for Arrow's own readers.

    Only the ranges that a reader asks for are read, so they cannot be checked against the digest; sizes are.

    Args:
        storage: the repository's tree.
        sizes: bytes of each object, as its table says.

    Attributes:
        failure: the first error of ours that reading met; other libraries pass on its text alone.
    """

    def __init__(self, storage: Storage, sizes: Mapping[Digest, int]) -> None:
        super().__init__()
        self.failure: DatasvcError | None = None
        self._storage = storage
        self._sizes = sizes

    def get_type_name(self) -> str:
        """Return a name for messages."""
        return "datasvc"

    def normalize_path(self, path: str) -> str:
        """Return `path`: digests have one way to be written."""
        return path

    def get_file_info(self, paths: list[str]) -> list[arrow_fs.FileInfo]:
        """Return the sizes that the table says."""
        return [arrow_fs.FileInfo(path, arrow_fs.FileType.File, size=self._sizes[Digest(path)]) for path in paths]

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open an object. Raises NotFoundError, CorruptDataError (of another size), UnavailableError."""
        try:
            return self._open(Digest(path))
        except DatasvcError as error:
            self.failure = self.failure or error
            raise

    open_input_stream = open_input_file

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
        with translated("map", where):
            return pa.memory_map(str(local))

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Return a part of an object. Raises as `Storage.read_range`."""
        try:
            return self._storage.read_range(path, offset, length)
        except DatasvcError as error:
            self.failure = self.failure or error
            raise

    def _refuse(self, *_arguments: Any) -> Any:
        raise NotImplementedError("objects are read, never listed or changed, by Arrow")

    get_file_info_selector = _refuse
    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _refuse
    move = copy_file = open_output_stream = open_append_stream = _refuse


class _RangedFile:
    """A remote object as a seekable file; used by one thread at a time."""

    closed = False

    def __init__(self, files: ObjectFiles, path: str, size_bytes: int) -> None:
        self._files = files
        self._path = path
        self._size_bytes = size_bytes
        self._offset = 0

    def read(self, length: int = -1) -> bytes:
        left = max(self._size_bytes - self._offset, 0)
        length = left if length < 0 else min(length, left)
        content = self._files.read_range(self._path, self._offset, length) if length else b""
        self._offset += len(content)
        return content

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
