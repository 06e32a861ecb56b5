"""Reads tars as streams, one member at a time, in bounded memory.

A damaged or truncated tar is always an error. Python's `tarfile` is not used, because it ends without an error if a
header is damaged or the tar is truncated at a header: the remaining samples would be lost without a message. Links
and devices are never followed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, TypeVar, cast

from datasvc.errors import CorruptDataError
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.streams import DECOMPRESSION_ERRORS, decompress, read_up_to
from datasvc.shards.sources.tar import tar_header
from datasvc.shards.sources.tar.tar_header import BLOCK_BYTES, padded

MAX_MEMBER_BYTES: Final = 1 << 30

_T = TypeVar("_T")
_ZEROS: Final = bytes(BLOCK_BYTES)
_PIECE_BYTES: Final = 4 << 20  # maximum size of a read that skips bytes
_MIN_SEEK_BYTES: Final = 1 << 16  # minimum distance of a seek; a shorter distance is read
_MAX_EXTENSION_BYTES: Final = 1 << 20  # maximum size of a pax header or a long name
# Offset of GNU tar's flag for a further block of the sparse map: in the header, and in a block of the map.
_FLAG_OFFSET_IN_HEADER, _FLAG_OFFSET_IN_MAP = 482, 504
_GZIP_MAGIC, _ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class TarMember:
    """A member of a tar that is not a folder.

    Attributes:
        name: name of the member. Bytes that are not valid UTF-8 are escaped.
        offset: offset of its content in the decompressed tar.
        size_bytes: size of its content.
        problem: reason why the member must not be used (it is not a regular file, or its name is absolute, has `..`
            or is not UTF-8); None for a valid member.
    """

    name: str
    offset: int
    size_bytes: int
    problem: str | None = None


class TarReader:
    """Iterator over the members of a tar; can be used once.

    Args:
        stream: stream at the start of the tar. If it is seekable, `seek` passes large contents that are not read.
        location: path of the tar for messages.

    Raises:
        CorruptDataError: by iteration and `read`: the tar is truncated, damaged or not a tar. The message has the
            offset; nothing can be read after it.
        UnavailableError: by iteration and `read`: the store does not respond.
    """

    def __init__(self, stream: BinaryIO, location: str) -> None:
        self._stream = stream
        self._location = location
        self._position = 0  # offset of the stream in the decompressed tar
        self._next_header = 0  # offset of the next header
        # Values of global pax headers, which hold for all members that follow.
        self._global_pax: dict[bytes, bytes] = {}

    def __iter__(self) -> Iterator[TarMember]:
        return iter(self._next_member, None)

    def read(self, member: TarMember) -> bytes:
        """Return the content of the member that was yielded last; call it once per member. Errors: see the class."""
        assert self._position == member.offset
        return self._read_exactly(member.size_bytes)

    def _next_member(self) -> TarMember | None:
        """Return the next member that is not a folder; None at the end of the tar."""
        # Extension headers come before the header of the member that they describe, so collect their values first.
        pax, long_name = dict(self._global_pax), None
        while (header := self._read_header()) is not None:
            kind = tar_header.kind_of(header)
            size_bytes = self._parsed(tar_header.size_of, header)
            if kind in tar_header.PAX:
                pax.update(self._parsed(tar_header.pax_values, self._read_extension(size_bytes)))
            elif kind == tar_header.PAX_GLOBAL:
                self._global_pax.update(self._parsed(tar_header.pax_values, self._read_extension(size_bytes)))
                # Values that were read for the next member alone override global ones.
                pax = {**self._global_pax, **pax}
            elif kind == tar_header.LONG_NAME:
                long_name = tar_header.terminated(self._read_extension(size_bytes))
            elif kind == tar_header.LONG_LINK:
                self._read_extension(size_bytes)  # not used, because links are not followed
            else:
                # The size in a pax header overrides that in the member's own header. An empty value counts as absent.
                if pax.get(b"size"):
                    size_bytes = self._parsed(tar_header.pax_size, pax[b"size"])
                name = pax.get(b"path") or long_name or tar_header.short_name(header)
                member = self._member(header, name, size_bytes, pax)
                if member is not None:
                    return member
                pax, long_name = dict(self._global_pax), None  # the collected values were those of a folder
        return None

    def _member(self, header: bytes, name: bytes, size_bytes: int, pax: dict[bytes, bytes]) -> TarMember | None:
        """Return the member whose `header` was read last, or None for a folder.

        Set the position of the next header. After a member is returned, the stream is at its content.
        """
        kind = tar_header.kind_of(header)
        if kind == tar_header.FOLDER or (kind in tar_header.FILE and name.endswith(b"/")):
            return None
        if kind == tar_header.SPARSE:
            self._skip_sparse_map(header)
        if kind in tar_header.WITHOUT_CONTENT:
            size_bytes = 0
        self._next_header = self._position + padded(size_bytes)
        problem = tar_header.problem_of_kind(kind, pax) or tar_header.problem_of_name(name)
        return TarMember(name.decode(errors="backslashreplace"), self._position, size_bytes, problem)

    def _read_header(self) -> bytes | None:
        """Return the next header block; None at the end mark, a block of zeros. For errors, see the class."""
        self._skip_to(self._next_header)
        start = self._position
        header = self._take(BLOCK_BYTES)
        self._next_header = self._position
        if header == _ZEROS:
            self._check_end()
            return None
        if not header:
            raise self._broken(start, "ends without an end mark: it is truncated" if start else "is empty")
        # A wrong checksum at the start means that the file is no tar; later, that the tar is damaged.
        if start == 0 and not tar_header.has_right_checksum(header):
            raise self._broken(start, f"is not a tar: it starts with {header[:16]!r}")
        if len(header) < BLOCK_BYTES:
            raise self._broken(start, "ends within a header: it is truncated")
        if not tar_header.has_right_checksum(header):
            raise self._broken(start, f"has a header with a wrong checksum; it starts with {header[:16]!r}")
        return header

    def _check_end(self) -> None:
        """Read to the end: a compressed stream is verified only there, and only zeros may follow the end mark."""
        while piece := self._take(_PIECE_BYTES):
            if piece.count(0) < len(piece):
                raise self._broken(
                    self._position - len(piece.lstrip(b"\0")),
                    "has content after its end mark, which no reader reads; split concatenated tars again",
                )

    def _skip_to(self, offset: int) -> None:
        """Move the stream forward to `offset`. Raise CorruptDataError if the tar ends before it."""
        if offset - self._position > _MIN_SEEK_BYTES and self._stream.seekable():
            # A seek beyond the end of the file succeeds. The truncation is found when the next header is read.
            self._guarded(self._stream.seek, offset - self._position, io.SEEK_CUR)
            self._position = offset
        while self._position < offset:
            if not self._take(min(offset - self._position, _PIECE_BYTES)):
                raise self._broken(self._position, "ends within a member: it is truncated")

    def _skip_sparse_map(self, header: bytes) -> None:
        is_continued = header[_FLAG_OFFSET_IN_HEADER]
        while is_continued:
            is_continued = self._read_exactly(BLOCK_BYTES)[_FLAG_OFFSET_IN_MAP]

    def _read_extension(self, length: int) -> bytes:
        """Return the content of an extension header. Raise CorruptDataError if it is too long or truncated."""
        if length > _MAX_EXTENSION_BYTES:
            raise self._broken(
                self._position, f"has a header of {length} bytes; expected at most {_MAX_EXTENSION_BYTES}"
            )
        self._next_header = self._position + padded(length)
        return self._read_exactly(length)

    def _read_exactly(self, length: int) -> bytes:
        # `length` may be a false size: `read_up_to` reads piecewise, so it allocates no more than the stream has.
        content = self._take(length)
        if len(content) < length:
            start = self._position - len(content)
            raise self._broken(start, f"ends within a member of {length} bytes: it is truncated")
        return content

    def _take(self, length: int) -> bytes:
        """Return the next `length` bytes, fewer at the end of the stream."""
        piece = self._guarded(read_up_to, self._stream, length)
        self._position += len(piece)
        return piece

    def _guarded(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Call an operation of the stream, and convert its errors to those that the class raises."""
        try:
            return call(*arguments)
        except DECOMPRESSION_ERRORS as error:
            raise self._broken(self._position, f"cannot be decompressed: {error}") from error
        except OSError:
            with map_exceptions("read", self._location):
                raise

    def _parsed(self, parse: Callable[[bytes], _T], content: bytes) -> _T:
        """Parse a header with a function of `tar_header`; raise CorruptDataError if it is damaged."""
        try:
            return parse(content)
        except ValueError as error:
            raise self._broken(self._position, f"has a damaged header: {error}") from error

    def _broken(self, offset: int, problem: str) -> CorruptDataError:
        return CorruptDataError(f"the tar {self._location} {problem} (at byte {offset})")


def open_tar(reader: FileReader, path: str, *, start: int = 0, stop: int | None = None) -> BinaryIO:
    """Open the tar at `path`, or the tar inside it at bytes `start` to `stop`, as a stream that the caller closes.

    Its compression is detected by its first bytes, because a name may be "x.tgz" or wrong. For errors, see
    `FileReader.open`.
    """
    stream = reader.open(path, start=start, stop=stop)
    with map_exceptions("read", reader.location(path)):
        try:
            first = cast("Any", stream).peek(4)[:4]
        except DECOMPRESSION_ERRORS:
            return stream  # the first read raises the error with its offset
    if first.startswith(_GZIP_MAGIC):
        return decompress(stream, "gzip")
    return decompress(stream, "zstd") if first == _ZSTD_MAGIC else stream
