"""The files of a source: found on any fsspec URL, never outside it, and read whole or as a stream.

Local files are read without going through fsspec, which takes longer than the read. Remote streams are read ahead by
a bounded number of ranged requests, decompressed on the way.
"""

from __future__ import annotations

import gzip
import io
import os
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, Final, NamedTuple, cast

import pyarrow as pa
import zstandard
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository.repository import MARKER
from datasvc.repository.store.retries import map_exceptions
from datasvc.repository.store.storage import redact_url, resolve_url
from datasvc.shards.sources.common.local_files import check_inside, find_local

COMPRESSIONS: Final = {".gz": "gzip", ".zst": "zstd"}
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAX_EXPANDED = 1_000_000
_BLOCK_BYTES = 1 << 20
_BLOCKS_AHEAD = 4


class SourceFile(NamedTuple):
    """A file of a source as listed; a tuple, since a listing holds millions.

    Attributes:
        name: path below the source's root, forward slashes; the file's own name for a single file.
        path: on the source's file system.
        size_bytes: as listed.
        stamp: changes when the file may have changed.
    """

    name: str
    path: str
    size_bytes: int
    stamp: str

    @property
    def extension(self) -> str:
        """Return the lower-case extension without a compression: ".tar" of "a.TAR.gz"."""
        base, last = os.path.splitext(self.name.lower())
        return os.path.splitext(base)[1] if last in COMPRESSIONS else last


def list_files(url: str) -> list[SourceFile]:
    """Return the files that `url` means, ordered by name: a file, a folder, a `*` pattern, or brace notation.

    Hidden files and folders (a name that starts with a dot or an underscore) are left out, but for `url` itself.

    Raises:
        NotFoundError: nothing is there, or one of the files that braces name is not.
        ConfigError: a link leads out of the source; a path climbs; the URL has no driver.
        UnavailableError: the store does not answer.
    """
    expanded = expand_braces(url)
    if len(expanded) > 1:
        return _named_from_one_root([file for each in expanded for file in _list_one(each)])
    return _list_one(expanded[0])


def expand_braces(text: str) -> list[str]:
    """Return what brace notation names: `a-{00..02}.tar` three, `{x,y}` two, in that order.

    Raises:
        ConfigError: a range runs backwards, or there are absurdly many.
    """
    match = _BRACES.search(text)
    if match is None:
        return [text]
    choices = _choices(match[1])
    expanded = [
        after
        for choice in choices
        for after in expand_braces(f"{text[: match.start()]}{choice}{text[match.end() :]}")
    ]
    if len(expanded) > _MAX_EXPANDED:
        raise ConfigError(f"{redact_url(text)} names {len(expanded)} files; expected at most {_MAX_EXPANDED}")
    return expanded


class FileReader:
    """Reads files of one source.

    Args:
        url: of the source, or of a file in it.
    """

    def __init__(self, url: str) -> None:
        self.file_system, self.root = resolve_url(expand_braces(url)[0])
        self.is_local = isinstance(self.file_system, LocalFileSystem)

    def read(self, path: str) -> bytes:
        """Return the whole file. Raises NotFoundError, UnavailableError."""
        with map_exceptions("read", self.location(path)):
            if not self.is_local:
                return bytes(self.file_system.cat_file(path))
            with open(path, "rb", buffering=0) as opened:
                return opened.read()

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`, fewer at the end. Raises NotFoundError, UnavailableError."""
        with map_exceptions("read", self.location(path)):
            return bytes(self.file_system.cat_file(path, start=offset, end=offset + length))

    def open(self, path: str, *, start: int = 0, stop: int | None = None) -> BinaryIO:
        """Return a file as a stream, decompressed where its name says that it is compressed.

        A local file that is not compressed can seek. Remote ones are read ahead: `_BLOCKS_AHEAD` requests of
        `_BLOCK_BYTES` are under way.

        Args:
            path: of the file.
            start: offset of the first byte; for files that are not compressed.
            stop: offset behind the last; None: the end of the file.

        Raises:
            NotFoundError, UnavailableError: also by reading from it.
        """
        compression = COMPRESSIONS.get(os.path.splitext(path)[1].lower())
        raw: Any
        with map_exceptions("open", self.location(path)):
            if self.is_local:
                raw = open(path, "rb")  # noqa: SIM115 - the caller closes it
                raw.seek(start)
                if stop is not None:
                    raw = io.BufferedReader(_Limited(raw, stop - start), 1 << 17)
            else:
                size_bytes = int(self.file_system.info(path)["size"]) if stop is None else stop
                raw = io.BufferedReader(_ReadAheadFile(self, path, start, size_bytes), 1 << 17)
        return decompressed(raw, compression) if compression else cast("BinaryIO", raw)

    def location(self, path: str) -> str:
        """Return a path for messages."""
        return path if self.is_local else redact_url(str(self.file_system.unstrip_protocol(path)))


def decompressed(stream: BinaryIO, compression: str) -> BinaryIO:
    """Return what `stream` holds, decompressed on the way; closing it closes `stream`.

    Args:
        stream: at its start.
        compression: one of the values of `COMPRESSIONS`.
    """
    if compression == "gzip":
        return cast("BinaryIO", _Gunzipped(stream))
    return cast("BinaryIO", io.BufferedReader(_Unzstd(stream), 1 << 17))


class _Gunzipped(gzip.GzipFile):
    """A gzip stream that closes the stream below it, which the library leaves open."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(fileobj=stream, mode="rb")
        self._below = stream

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._below.close()


class _Unzstd(io.RawIOBase):
    """A zstd stream of any number of frames; one that is cut off is an error, as with gzip.

    Arrow decompresses: the reader of `zstandard` takes the end of the stream for the end of the content.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._below = stream
        self._unpacked = pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        try:
            return int(self._unpacked.readinto(target))
        except OSError as error:
            if "Truncated" in str(error):
                raise EOFError("the compressed content is cut off") from error
            raise zstandard.ZstdError(str(error)) from error

    def close(self) -> None:
        if not self.closed:
            self._below.close()
        super().close()


class _ReadAheadFile(io.RawIOBase):
    """A remote file read from `start` to `stop` by ranged requests that run ahead of the reader."""

    def __init__(self, reader: FileReader, path: str, start: int, stop: int) -> None:
        self._pool = ThreadPoolExecutor(_BLOCKS_AHEAD, thread_name_prefix="datasvc-ahead")
        self._reader, self._path = reader, path
        self._offsets: Iterator[int] = iter(range(start, stop, _BLOCK_BYTES))
        self._stop = stop
        self._under_way: deque[Future[bytes]] = deque()
        self._block = memoryview(b"")
        for _ in range(_BLOCKS_AHEAD):
            self._request()

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        if not self._block:
            if not self._under_way:
                return 0
            self._block = memoryview(self._under_way.popleft().result())
            self._request()
        wanted = memoryview(target).cast("B")
        count = min(len(wanted), len(self._block))
        wanted[:count] = self._block[:count]
        self._block = self._block[count:]
        return count

    def close(self) -> None:
        if not self.closed:
            self._pool.shutdown(wait=True, cancel_futures=True)
        super().close()

    def _request(self) -> None:
        offset = next(self._offsets, None)
        if offset is not None:
            length = min(_BLOCK_BYTES, self._stop - offset)
            self._under_way.append(self._pool.submit(self._reader.read_range, self._path, offset, length))


class _Limited(io.RawIOBase):
    """The next `length` bytes of an open file."""

    def __init__(self, file: BinaryIO, length: int) -> None:
        self._file, self._left = file, length

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        wanted = memoryview(target).cast("B")[: self._left]
        count = self._file.readinto(wanted) if wanted else 0  # type: ignore[attr-defined]
        self._left -= count
        return int(count)

    def close(self) -> None:
        self._file.close()
        super().close()


def _list_one(url: str) -> list[SourceFile]:
    file_system, root = resolve_url(url)
    with map_exceptions("list", redact_url(url)):
        if file_system.isfile(root):  # first: a question mark may begin the query of a web address
            base, found = root.rpartition("/")[0], {root: file_system.info(root)}
        elif any(sign in root for sign in "*?["):
            base = re.split(r"[*?\[]", root, maxsplit=1)[0].rpartition("/")[0]
            found = {
                path: info for path, info in file_system.glob(root, detail=True).items() if info["type"] == "file"
            }
            if not found:
                raise NotFoundError(f"no file matches {redact_url(url)}")
        elif not file_system.isdir(root):
            raise NotFoundError(f"nothing is at {redact_url(url)}")
        else:
            shown = [file for file in find_files(file_system, root) if not _is_hidden(file.name)]
            return sorted(shown, key=lambda file: file.name)
    if isinstance(file_system, LocalFileSystem) and len(found) > 1:
        check_inside(base, list(found))
    files = [
        SourceFile(_shown_name(path[len(base) :]), path, *_size_and_stamp(file_system, path, info))
        for path, info in found.items()
    ]
    return sorted(files, key=lambda file: file.name)


def find_files(file_system: AbstractFileSystem, root: str) -> list[SourceFile]:
    """Return every file below the folder `root`, in no particular order; repositories of ours left out.

    Raises:
        ConfigError: a link leads out of it, to nothing, or back to a folder above it.
        OSError: it cannot be listed; to be translated by the caller.
    """
    if isinstance(file_system, LocalFileSystem):
        found = [
            SourceFile(name, path, size_bytes, str(modified_ns))
            for name, path, size_bytes, modified_ns in find_local(root)
        ]
    else:
        found = [
            SourceFile(path[len(root) :].lstrip("/"), path, int(info["size"]), _stamp_of(info))
            for path, info in file_system.find(root, detail=True).items()
        ]
    # Most names end otherwise, which is quicker to see than what their last part is.
    ours = [file.name.removesuffix(MARKER) for file in found if file.name.endswith(MARKER) and is_marker(file.name)]
    return [file for file in found if not file.name.startswith(tuple(ours))] if ours else found


def is_marker(name: str) -> bool:
    """Return whether a file marks the root of a repository: what is stored there is no source."""
    return name.rpartition("/")[2] == MARKER


def find_below(url: str) -> tuple[dict[str, SourceFile], str]:
    """Return every file below the folder `url` by its name there, and the folder's own path.

    Raises:
        NotFoundError: there is no such folder.
        ConfigError, UnavailableError: as `list_files`.
    """
    file_system, root = resolve_url(url)
    with map_exceptions("list", redact_url(url)):
        if not file_system.isdir(root):
            raise NotFoundError(f"cannot ingest {redact_url(url)}: there is no such folder")
        return {file.name: file for file in find_files(file_system, root)}, root


def _shown_name(path: str) -> str:
    """Return a file's name; a signature in a web address is no part of it."""
    return path.lstrip("/").partition("?")[0] or path.lstrip("/")


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.split("/"))


def _size_and_stamp(file_system: AbstractFileSystem, path: str, info: dict[str, Any]) -> tuple[int, str]:
    if isinstance(file_system, LocalFileSystem):
        status = os.stat(path)  # of what a link leads to
        return status.st_size, str(status.st_mtime_ns)
    return int(info["size"]), _stamp_of(info)


def _named_from_one_root(files: list[SourceFile]) -> list[SourceFile]:
    """Return files that braces name with names below the folder they share: `{train,val}/0.tar` are two names."""
    # Cut to a folder; `commonpath` would make "http:/" of "http://".
    root = os.path.commonprefix([file.path for file in files]).rpartition("/")[0]  # noqa: RUF071
    return [file._replace(name=file.path[len(root) :].lstrip("/")) for file in files]


def _stamp_of(info: dict[str, Any]) -> str:
    """Return what changes with a file's content, of what a store says of it."""
    for name in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created"):
        if info.get(name) is not None:
            return str(info[name])
    return ""


def _choices(inner: str) -> list[str]:
    match = _RANGE.fullmatch(inner)
    if match is None:
        return inner.split(",")
    first, last = match[1], match[2]
    if int(first) > int(last):
        raise ConfigError(f"the range {{{inner}}} runs backwards")
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
