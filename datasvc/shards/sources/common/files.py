"""Lists and reads the files of a source on any fsspec URL.

Source classes list files with `list_files` or `find_below`, and read them with a `FileReader`.

A link that leads out of the source is an error: an ingest reads no file outside the folder that its user named.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow as pa
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from datasvc.durable import target_outside
from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository.marker import MARKER
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.retries import map_exceptions
from datasvc.repository.store.storage import resolve_url
from datasvc.shards.sources.common.streams import BUFFER_BYTES, COMPRESSIONS, WrappingStream, decompress

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAX_EXPANDED = 1_000_000
# A remote stream requests `_BLOCKS_AHEAD` blocks of this size at the same time, which bounds its memory.
_BLOCK_BYTES = 1 << 20
_BLOCKS_AHEAD = 4
_BLOCKS_KEPT = 8  # blocks that a file opened for random access keeps in memory


class SourceFile(NamedTuple):
    """A file of a source, as listed.

    Attributes:
        name: path below the source's root, with forward slashes; the file name for a single file.
        path: path on the source's file system.
        size_bytes: size when it was listed.
        stamp: modification time or entity tag; another value means that the file may have changed.
    """

    # A tuple and not a dataclass, to save memory: a listing may have millions of files.

    name: str
    path: str
    size_bytes: int
    stamp: str

    @property
    def extension(self) -> str:
        """The lower-case extension without that of a compression: ".tar" for "a.TAR.gz"."""
        return extension_of(self.name)

    @property
    def is_compressed(self) -> bool:
        """Whether the file is compressed as a whole, by its name."""
        return self.name.lower().endswith(tuple(COMPRESSIONS))


def extension_of(name: str) -> str:
    """Return the lower-case extension of a file name without that of a compression."""
    base, last = os.path.splitext(name.lower())
    return os.path.splitext(base)[1] if last in COMPRESSIONS else last


def count_extensions(files: Iterable[SourceFile]) -> Counter[str]:
    """Return the number of files by extension, for `Source.ignored`."""
    return Counter(file.extension or "(none)" for file in files)


def list_files(url: str) -> list[SourceFile]:
    """Return the files at `url`, ordered by name: a file, a folder, a `*` pattern, or brace notation.

    Hidden files and folders (their names start with a dot or an underscore) are left out, except `url` itself.

    Raises:
        NotFoundError: there is no file at `url`, or a file that brace notation names is missing.
        ConfigError: a link is not valid, see `find_files`; a range in braces is not valid; or the URL has no driver.
        UnavailableError: the store does not respond.
    """
    expanded = expand_braces(url)
    if len(expanded) > 1:
        return _named_from_one_root([file for single_url in expanded for file in _list_one(single_url)])
    return _list_one(expanded[0])


def expand_braces(text: str) -> list[str]:
    """Expand brace notation: `a-{00..02}.tar` gives three texts, `{x,y}` two, in this order.

    Raises:
        ConfigError: a range runs backwards, or there are more than a million texts.
    """
    groups = [(match.span(), _choices(match[1])) for match in _BRACES.finditer(text)]
    # Count first: a list of all texts could need more memory than the machine has.
    num_texts = math.prod(len(choices) for _, choices in groups)
    if num_texts > _MAX_EXPANDED:
        raise ConfigError(
            f"{redact_url(text)} names {num_texts} files; expected at most {_MAX_EXPANDED}; use smaller ranges"
        )
    expanded, stop = [""], 0
    for (start, end), choices in groups:
        expanded = [f"{prefix}{text[stop:start]}{choice}" for prefix in expanded for choice in choices]
        stop = end
    texts = [f"{prefix}{text[stop:]}" for prefix in expanded]
    if not groups:
        return texts
    # Only the innermost braces are expanded yet, so expand those around them.
    return [complete for partly in texts for complete in expand_braces(partly)]


class FileReader:
    """Reads the files of one source.

    Args:
        url: URL of the source, or of a file in it.

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
        """Open a file as a stream, decompressed if its name has the extension of a compression.

        The stream can seek only in a local, uncompressed file without `stop`. A remote file is read ahead.

        Args:
            path: path of the file.
            start: offset of the first byte; only for files that are not compressed.
            stop: offset after the last byte; None: the end of the file.

        Raises:
            NotFoundError: there is no such file; also raised by reads.
            UnavailableError: the store does not respond; also raised by reads.
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
        return decompress(raw, compression) if compression else cast("BinaryIO", raw)

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


def _list_one(url: str) -> list[SourceFile]:
    """Return the files at a URL without braces, ordered by name. For errors, see `list_files`."""
    file_system, root = resolve_url(url)
    # In each case, names are relative to a folder: `base` for files and patterns, `root` for a folder.
    with map_exceptions("list", redact_url(url)):
        # Test for a file before a pattern, because a question mark may start the query of a web address.
        if file_system.isfile(root):
            base, infos = root.rpartition("/")[0], {root: file_system.info(root)}
        elif any(sign in root for sign in "*?["):
            # The names begin after the last folder without a pattern.
            base = re.split(r"[*?\[]", root, maxsplit=1)[0].rpartition("/")[0]
            is_local = isinstance(file_system, LocalFileSystem)
            # A local link has a type of its own, and is not silently left out.
            infos = {
                path: info
                for path, info in file_system.glob(root, detail=True).items()
                if info["type"] == "file" or (is_local and os.path.islink(path) and not os.path.isdir(path))
            }
            if not infos:
                raise NotFoundError(f"no file matches {redact_url(url)}; check the pattern")
        elif not file_system.isdir(root):
            raise NotFoundError(f"there is no file or folder at {redact_url(url)}; check the URL")
        else:
            visible = [file for file in find_files(file_system, root) if not _is_hidden(file.name)]
            return sorted(visible, key=lambda file: file.name)
    # A file that the URL itself names may be a link out of its folder, but not one that a pattern finds.
    if isinstance(file_system, LocalFileSystem) and [*infos] != [root]:
        check_inside(base, list(infos))
    files = [
        SourceFile(_shown_name(path[len(base) :]), path, *_size_and_stamp(file_system, path, info))
        for path, info in infos.items()
    ]
    return sorted(files, key=lambda file: file.name)


def find_files(file_system: AbstractFileSystem, root: str) -> list[SourceFile]:
    """Return every file below the folder `root`, unordered; the files of a datasvc repository are left out.

    Raises:
        ConfigError: a link leads out of the folder, to a missing file, or back to a parent folder.
        OSError: the folder cannot be listed; the caller maps it.
    """
    if isinstance(file_system, LocalFileSystem):
        files = list(_find_local(root))
    else:
        files = [
            SourceFile(path[len(root) :].lstrip("/"), path, int(info["size"]), _stamp_of(info))
            for path, info in file_system.find(root, detail=True).items()
        ]
    # `endswith` first: it is cheaper than splitting the name, and false for nearly all files.
    markers = [file.name for file in files if file.name.endswith(MARKER) and is_marker(file.name)]
    if not markers:
        return files
    repository_folders = tuple(marker.removesuffix(MARKER) for marker in markers)  # "" is the root
    return [file for file in files if not file.name.startswith(repository_folders)]


def _find_local(root: str) -> Iterator[SourceFile]:
    """Yield every file below a local folder, about ten times faster than fsspec. For errors, see `find_files`."""
    real_root = os.path.realpath(root)
    # Folders to list: path, prefix of the names in it, and the real paths from the root down to the folder.
    pending: list[tuple[str, str, tuple[str, ...]]] = [(root, "", (real_root,))]
    while pending:
        folder, prefix, parents = pending.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                # This test comes first: it needs no other system call, and it is true for nearly all entries.
                is_plain_file = entry.is_file(follow_symlinks=False)
                if not is_plain_file and entry.is_symlink():
                    check_inside(real_root, [entry.path])
                if is_plain_file or entry.is_file():
                    status = entry.stat()  # of the target of a link, since the target is what is read
                    yield SourceFile(prefix + entry.name, entry.path, status.st_size, str(status.st_mtime_ns))
                elif entry.is_dir():
                    real = os.path.realpath(entry.path) if entry.is_symlink() else f"{parents[-1]}/{entry.name}"
                    if real in parents:
                        raise ConfigError(f"{entry.path} is a link to one of its parent folders; remove this link")
                    pending.append((entry.path, f"{prefix}{entry.name}/", (*parents, real)))


def check_inside(root: str, paths: Sequence[str]) -> None:
    """Raise ConfigError if the target of one of the local `paths` is outside `root` or does not exist."""
    for path in paths:
        if (target := target_outside(root, path)) is not None:
            raise ConfigError(
                f"{path} is a link out of the source, to {target}; copy it into the source, or ingest that folder too"
            )
        if not os.path.exists(path):
            raise ConfigError(f"{path} is a link to {os.path.realpath(path)}, which does not exist; remove the link")


def is_marker(name: str) -> bool:
    """Return whether the file `name` marks its folder as a repository, whose files are not part of a source."""
    return name.rpartition("/")[2] == MARKER


def find_below(url: str) -> tuple[dict[str, SourceFile], str]:
    """Return all files below the folder `url`, by path relative to the folder, and the folder's own path.

    If `url` is a file, a pattern or brace notation, return the result of `list_files` by name, and its folder.

    Raises:
        NotFoundError: there is no file or folder at `url`.
        ConfigError: see `list_files`.
        UnavailableError: the store does not respond.
    """
    file_system, root = resolve_url(url)
    with map_exceptions("list", redact_url(url)):
        if file_system.isdir(root):
            return {file.name: file for file in find_files(file_system, root)}, root
    files = list_files(url)
    # The names of all files are relative to the same folder, so take it from the first file.
    folder = files[0].path.removesuffix(files[0].name).rstrip("/")
    return {file.name: file for file in files}, folder


def _shown_name(path: str) -> str:
    """Return the name of a file from its path; without the query of a web address, which may contain a secret."""
    return path.lstrip("/").partition("?")[0] or path.lstrip("/")


def _is_hidden(name: str) -> bool:
    """Return whether a file, or a folder in its path below the source, is hidden (see `list_files`)."""
    return any(part.startswith((".", "_")) for part in name.split("/"))


def _size_and_stamp(file_system: AbstractFileSystem, path: str, info: dict[str, Any]) -> tuple[int, str]:
    """Return size in bytes and stamp of a file; `info` is its description in the listing of `file_system`."""
    if isinstance(file_system, LocalFileSystem):
        status = os.stat(path)  # of the target of a link, since the target is what is read
        return status.st_size, str(status.st_mtime_ns)
    return int(info["size"]), _stamp_of(info)


def _named_from_one_root(files: list[SourceFile]) -> list[SourceFile]:
    """Return the files with names below their common folder: `{train,val}/0.tar` gives two different names."""
    # The common prefix is cut at a folder; `commonpath` would turn "http://" into "http:/".
    root = os.path.commonprefix([file.path for file in files]).rpartition("/")[0]  # noqa: RUF071
    return [file._replace(name=file.path[len(root) :].lstrip("/")) for file in files]


def _stamp_of(info: dict[str, Any]) -> str:
    """Return a value from a store's listing that differs if the content of the file differs; "" if there is none."""
    for name in (
        "ETag",
        "etag",
        "md5Hash",
        "mtime",
        "LastModified",
        "last_modified",
        "created",
        "blob_id",
        "xet_hash",
    ):
        if info.get(name) is not None:
            return str(info[name])
    return ""


def _choices(inner: str) -> Sequence[str]:
    """Return the texts that `inner`, the text between two braces, stands for.

    Raise ConfigError for a range that runs backwards or is too long.
    """
    match = _RANGE.fullmatch(inner)
    if match is None:
        return inner.split(",")
    first, last = match.groups()
    if int(first) > int(last):
        raise ConfigError(f"the range {{{inner}}} runs backwards; write the smaller number first")
    if int(last) - int(first) >= _MAX_EXPANDED:
        raise ConfigError(f"the range {{{inner}}} has more than {_MAX_EXPANDED} numbers; use smaller ranges")
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
