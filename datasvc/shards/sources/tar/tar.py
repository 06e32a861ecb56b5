"""Reads tars as streams, one member at a time, in bounded memory.

A damaged or truncated tar is always an error. Python's `tarfile` is not used, because it ends without an error if a
header is damaged or the tar is truncated at a header: the remaining samples would be lost without a message. Links
and devices are never followed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Final, TypeVar, cast

from datasvc.errors import CorruptDataError
from datasvc.repository.store.retries import map_exceptions
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.streams import DECOMPRESSION_ERRORS, decompress, read_up_to

MAX_MEMBER_BYTES: Final = 1 << 30

_T = TypeVar("_T")
_BLOCK_BYTES: Final = 512
# Type flags of extensions, which describe the next member: pax headers, and GNU's long names and link targets.
_PAX, _PAX_GLOBAL, _LONG_NAME, _LONG_LINK = (b"x", b"X"), b"g", b"L", b"K"
# Type flags of members: regular files (7 means that the blocks are contiguous), and others.
_FILE, _FOLDER, _SPARSE = (b"0", b"\0", b"7"), b"5", b"S"
_WITHOUT_CONTENT: Final = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a named pipe",
}
_MAX_NUMBER: Final = (1 << 43) - 1  # 8 TiB: file systems cannot seek to offsets near 2 ** 63
_ZEROS: Final = bytes(_BLOCK_BYTES)
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
        start: offset of its first header.
    """

    name: str
    offset: int
    size_bytes: int
    problem: str | None = None
    start: int = 0


class TarReader:
    """Iterator over the members of a tar; can be used once.

    Args:
        stream: stream at the start of the tar. If it is seekable, `seek` passes large contents that are not read.
        location: path of the tar for messages.
        length: end of the last member to read, which no end mark follows; None: the tar is read to its end.

    Raises:
        CorruptDataError: by iteration and `read`: the tar is truncated, damaged or not a tar. The message has the
            offset; nothing can be read after it.
        UnavailableError: by iteration and `read`: the store does not respond.
    """

    def __init__(self, stream: BinaryIO, location: str, length: int | None = None) -> None:
        self._length = length
        self._stream = stream
        self._location = location
        self._position = 0  # offset of the stream in the decompressed tar
        self._next_header = 0  # offset of the next header
        # Values of global pax headers, which hold for all members that follow.
        self._global_pax: dict[bytes, bytes] = {}

    def __iter__(self) -> Iterator[TarMember]:
        return iter(self._next_member, None)

    @property
    def has_global_header(self) -> bool:
        """Whether a header was read that holds for all members after it."""
        return bool(self._global_pax)

    def read(self, member: TarMember) -> bytes:
        """Return the content of the member that was yielded last; call it once per member. Errors: see the class."""
        assert self._position == member.offset
        return self._read_exactly(member.size_bytes)

    def _next_member(self) -> TarMember | None:
        """Return the next member that is not a folder; None at the end of the tar."""
        # Extension headers come before the header of the member that they describe, so collect their values first.
        pax, long_name, start = dict(self._global_pax), None, self._next_header
        while (header := self._read_header()) is not None:
            kind = _kind_of(header)
            size_bytes = self._parsed(_size_of, header)
            if kind in _PAX:
                pax.update(self._parsed(_pax_values, self._read_extension(size_bytes)))
            elif kind == _PAX_GLOBAL:
                self._global_pax.update(self._parsed(_pax_values, self._read_extension(size_bytes)))
                # Values that were read for the next member alone override global ones.
                pax = {**self._global_pax, **pax}
            elif kind == _LONG_NAME:
                long_name = _terminated(self._read_extension(size_bytes))
            elif kind == _LONG_LINK:
                self._read_extension(size_bytes)  # not used, because links are not followed
            else:
                # The size in a pax header overrides that in the member's own header. An empty value counts as absent.
                if pax.get(b"size"):
                    size_bytes = self._parsed(_pax_size, pax[b"size"])
                name = pax.get(b"path") or long_name or _short_name(header)
                member = self._member(header, name, size_bytes, pax)
                if member is not None:
                    return replace(member, start=start)
                start = self._next_header
                pax, long_name = dict(self._global_pax), None  # the collected values were those of a folder
        return None

    def _member(self, header: bytes, name: bytes, size_bytes: int, pax: dict[bytes, bytes]) -> TarMember | None:
        """Return the member whose `header` was read last, or None for a folder.

        Set the position of the next header. After a member is returned, the stream is at its content.
        """
        kind = _kind_of(header)
        if kind == _FOLDER or (kind in _FILE and name.endswith(b"/")):
            return None
        if kind == _SPARSE:
            has_more = header[_FLAG_OFFSET_IN_HEADER]
            while has_more:
                has_more = self._read_exactly(_BLOCK_BYTES)[_FLAG_OFFSET_IN_MAP]
        if kind in _WITHOUT_CONTENT:
            size_bytes = 0
        self._next_header = self._position + _padded(size_bytes)
        problem = _problem_of_kind(kind, pax) or _problem_of_name(name)
        return TarMember(name.decode(errors="backslashreplace"), self._position, size_bytes, problem)

    def _read_header(self) -> bytes | None:
        """Return the next header block; None at the end mark, a block of zeros. For errors, see the class."""
        if self._length is not None and self._next_header >= self._length:
            return None
        self._skip_to(self._next_header)
        start = self._position
        header = self._take(_BLOCK_BYTES)
        self._next_header = self._position
        if header == _ZEROS:
            self._check_end()
            return None
        if not header:
            raise self._broken(start, "ends without an end mark: it is truncated" if start else "is empty")
        # A wrong checksum at the start means that the file is no tar; later, that the tar is damaged.
        if start == 0 and not _has_right_checksum(header):
            raise self._broken(start, f"is not a tar: it starts with {header[:16]!r}")
        if len(header) < _BLOCK_BYTES:
            raise self._broken(start, "ends within a header: it is truncated")
        if not _has_right_checksum(header):
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

    def _read_extension(self, length: int) -> bytes:
        """Return the content of an extension header. Raise CorruptDataError if it is too long or truncated."""
        if length > _MAX_EXTENSION_BYTES:
            raise self._broken(
                self._position, f"has a header of {length} bytes; expected at most {_MAX_EXTENSION_BYTES}"
            )
        self._next_header = self._position + _padded(length)
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
        """Parse a header with one of the functions below; raise CorruptDataError if it is damaged."""
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


# Header blocks: ustar and its older forms, pax headers and GNU's long names. Specified in POSIX.1-2017, pax, "ustar
# Interchange Format" and "pax Header Block", and in the GNU tar manual, "Basic Tar Format".


def _padded(size_bytes: int) -> int:
    """Return the bytes that a content of `size_bytes` takes in a tar: the next multiple of the block size."""
    return -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _terminated(field: bytes) -> bytes:
    """Return the bytes of a field before its first NUL."""
    return field.partition(b"\0")[0]


def _kind_of(header: bytes) -> bytes:
    return header[156:157]


def _short_name(header: bytes) -> bytes:
    """Return the name that is stored in the header block itself."""
    name = _terminated(header[:100])
    # GNU's own format has other fields at the position of the ustar prefix.
    prefix = _terminated(header[345:500]) if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _size_of(header: bytes) -> int:
    """Return the size of the content: octal digits, or binary if the first bit is set. Raise ValueError."""
    field = header[124:136]
    if field[0] & 0x80:
        # A first byte of 0xff starts a negative number. Without its sign bit, it is out of range and refused.
        return _in_range(int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big"))
    return _in_range(_unsigned(field.strip(b" \0") or b"0", 8))


def _pax_size(value: bytes) -> int:
    """Return the size in a pax header, which overrides that of the header block. Raise ValueError."""
    return _in_range(_unsigned(value, 10))


def _pax_values(content: bytes) -> dict[bytes, bytes]:
    """Return the values of a pax header by name. Raise ValueError if an entry is malformed.

    An entry is its length in decimal digits, a blank, the name, "=", the value and a newline.
    """
    values, entries = {}, content
    while entries.strip(b"\0"):
        digits = entries[:20].partition(b" ")[0]
        length = _unsigned(digits, 10)
        name, equals, value = entries[len(digits) + 1 : length].partition(b"=")
        if not (equals and value.endswith(b"\n")) or length > len(entries):
            raise ValueError(f"{entries[:40]!r} is not a pax entry")
        values[name] = value[:-1]
        entries = entries[length:]
    return values


def _has_right_checksum(header: bytes) -> bool:
    """Return whether `header` is a header block with a correct checksum."""
    try:
        stored = _unsigned(header[148:156].strip(b" \0"), 8)
    except ValueError:
        return False
    summed = header[:148] + b" " * 8 + header[156:]  # the bytes of the checksum itself count as blanks
    total = sum(summed)
    if stored == total:
        return True
    return stored == total - 256 * sum(byte > 127 for byte in summed)  # old writers summed signed bytes


def _problem_of_kind(kind: bytes, pax: Collection[bytes]) -> str | None:
    """Return why a member of this type flag, with these pax names, is not a regular file; None if it is one."""
    if kind == _SPARSE or any(name.startswith(b"GNU.sparse.") for name in pax):
        return "is a sparse file; write the tar without --sparse"
    if kind in _WITHOUT_CONTENT:
        return f"is {_WITHOUT_CONTENT[kind]}; write the tar with --dereference --hard-dereference"
    return None if kind in _FILE else f"is not a regular file but of type {kind!r}"


def _problem_of_name(name: bytes) -> str | None:
    """Return why a member name is refused; None if it is valid."""
    try:
        name.decode()
    except UnicodeDecodeError:
        return "has a name that is not UTF-8"
    if name.startswith(b"/"):
        return "has an absolute name"
    return "has a name with '..', which leads out of the tar" if b".." in name.split(b"/") else None


def _unsigned(digits: bytes, base: int) -> int:
    if not digits.isdigit():  # int() would also accept signs, blanks and underscores
        raise ValueError(f"{digits[:40]!r} is not a number")
    return int(digits, base)


def _in_range(number: int) -> int:
    if number > _MAX_NUMBER:
        raise ValueError(f"{number} is too large; expected at most {_MAX_NUMBER}")
    return number
