"""Reads the files of a source on any fsspec URL; `listing` lists them."""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.retries import map_exceptions
from datasvc.repository.store.urls import resolve_url
from datasvc.shards.sources.common.file_checks import HEAD_BYTES, check_head
from datasvc.shards.sources.common.listing import expand_braces
from datasvc.shards.sources.common.streams import BUFFER_BYTES, COMPRESSIONS, WrappingStream, decompress

# A remote stream requests `_BLOCKS_AHEAD` blocks of this size at the same time, which bounds its memory.
_BLOCK_BYTES = 1 << 20
_BLOCKS_AHEAD = 4
_BLOCKS_KEPT = 8  # blocks that a file opened for random access keeps in memory


class FileReader:
    """Reads the files of the source at `url`.

    Attributes:
        file_system: file system of the URL.
        root: path of the URL on `file_system`; with brace notation, the first path.
        is_local: whether the files are on this machine.
    """

    def __init__(self, url: str) -> None:
        self.file_system, self.root = resolve_url(expand_braces(url)[0])
        self.is_local = isinstance(self.file_system, LocalFileSystem)

    def read(self, path: str) -> bytes:
        """Return the content of a file. Raise NotFoundError or UnavailableError."""
        with map_exceptions("read", self.location(path)):
            if not self.is_local:
                return bytes(self.file_system.cat_file(path))
            # Opened directly: a call through fsspec takes longer than the read of a small file.
            with open(path, "rb", buffering=0) as opened:
                return opened.read()

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`, fewer at the end of the file. For errors, see `read`."""
        with map_exceptions("read", self.location(path)):
            return bytes(self.file_system.cat_file(path, start=offset, end=offset + length))

    def open(self, path: str, *, start: int = 0, stop: int | None = None) -> BinaryIO:
        """Open a file from `start` to `stop` as a stream, decompressed if its name says that it is compressed.

        The stream can seek only in a local, uncompressed file without `stop`. A remote file is read ahead.

        Raises:
            ConfigError: the file holds a pointer or an error page in place of its data, see `check_head`.
            NotFoundError, UnavailableError: there is no such file, the store does not respond; also raised by reads.
        """
        compression = COMPRESSIONS.get(os.path.splitext(path)[1].lower())
        raw: Any
        with map_exceptions("open", self.location(path)):
            if not self.is_local:
                end = int(self.file_system.info(path)["size"]) if stop is None else stop
                raw = io.BufferedReader(_ReadAheadFile(self, path, start, end), BUFFER_BYTES)
            elif stop is not None:
                raw = io.BufferedReader(pa.OSFile(path).get_stream(start, stop - start), BUFFER_BYTES)
            else:
                raw = open(path, "rb")  # noqa: SIM115 - the caller closes it
                raw.seek(start)
            if not start:
                self._check_head(path, raw)
        return decompress(raw, compression) if compression else cast("BinaryIO", raw)

    def _check_head(self, path: str, raw: Any) -> None:
        """Raise what `check_head` raises, after closing the stream `raw`, which is at the start of the file."""
        try:
            check_head(self.location(path), raw.peek(HEAD_BYTES)[:HEAD_BYTES])
        except BaseException:
            raw.close()
            raise

    @contextmanager
    def open_seekable(self, path: str) -> Iterator[pa.NativeFile]:
        """Open a file for random access by Arrow, without decompressing it. For errors, see `open`.

        For a remote file, blocks are cached and the next one is read ahead.
        """
        with map_exceptions("open", self.location(path)):
            if self.is_local:
                opened = pa.OSFile(path)
            else:
                # Several blocks are kept, since Arrow reads several columns in turn, each at its own offset.
                remote = self.file_system.open(
                    path,
                    "rb",
                    block_size=_BLOCK_BYTES,
                    cache_type="background",
                    cache_options={"maxblocks": _BLOCKS_KEPT},
                )
                opened = pa.PythonFile(_ErrorMappingFile(remote, self.location(path)), mode="r")
        with opened:
            yield opened

    def location(self, path: str) -> str:
        """Return a path as shown in messages, without credentials."""
        return path if self.is_local else redact_url(str(self.file_system.unstrip_protocol(path)))


class _ReadAheadFile(io.RawIOBase):
    """A remote file from `start` to `stop`, read by range requests that are sent ahead of the reader."""

    def __init__(self, reader: FileReader, path: str, start: int, stop: int) -> None:
        self._pool = ThreadPoolExecutor(_BLOCKS_AHEAD, thread_name_prefix="datasvc-ahead")
        self._reader, self._path = reader, path
        self._offsets: Iterator[int] = iter(range(start, stop, _BLOCK_BYTES))  # of the blocks not requested yet
        self._stop = stop
        self._in_progress: deque[Future[bytes]] = deque()  # in the order of their offsets
        self._unread = memoryview(b"")  # rest of the block that is being read
        for _ in range(_BLOCKS_AHEAD):
            self._request_next()

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        if not self._unread:
            if not self._in_progress:
                return 0
            self._unread = memoryview(self._in_progress.popleft().result())
            # One request replaces the completed one, so that memory stays bounded.
            self._request_next()
        buffer = memoryview(target).cast("B")
        count = min(len(buffer), len(self._unread))
        buffer[:count] = self._unread[:count]
        self._unread = self._unread[count:]
        return count

    def close(self) -> None:
        if not self.closed:
            self._pool.shutdown(wait=True, cancel_futures=True)
        super().close()

    def _request_next(self) -> None:
        """Send the request for the next block, if any."""
        offset = next(self._offsets, None)
        if offset is not None:
            length = min(_BLOCK_BYTES, self._stop - offset)
            self._in_progress.append(self._pool.submit(self._reader.read_range, self._path, offset, length))


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
