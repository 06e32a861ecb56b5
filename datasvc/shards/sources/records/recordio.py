"""RecordIO, the file format of MXNet: records of any bytes, without a checksum. This module reads and writes records.

A record has one or several parts. A part has a magic number, a word of its flag (3 bits) and length (29 bits), its
bytes, and zeros up to a multiple of 4 bytes. If a record has the magic number at a multiple of 4 bytes, it is divided
there, and the number is left out. So each magic number at a multiple of 4 bytes of a file starts a part, and a file
can be read from any place.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, Final

from datasvc.errors import BadSampleError
from datasvc.shards.sources.common.streams import read_up_to
from datasvc.shards.sources.common.tensors import MAX_SAMPLE_BYTES

MAGIC: Final = struct.pack("<I", 0xCED7230A)
MAX_RECORD_BYTES: Final = (1 << 29) - 1
_HEADER: Final = struct.Struct("<4sI")  # magic number; flag and length
_LENGTH_BITS: Final = 29
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)  # flags
_STARTS, _CONTINUATIONS = (_WHOLE, _FIRST), (_MIDDLE, _LAST)
_SCAN_BYTES: Final = 4096


def frame(record: bytes) -> bytes:
    """Return a record of at most `MAX_RECORD_BYTES` as it is stored in a file."""
    parts, start = [], 0
    while (found := _find_magic(record, start)) >= 0:
        parts.append(record[start:found])
        start = found + len(MAGIC)
    parts.append(record[start:])
    flags = [_FIRST, *[_MIDDLE] * (len(parts) - 2), _LAST] if len(parts) > 1 else [_WHOLE]
    heads = [_HEADER.pack(MAGIC, flag << _LENGTH_BITS | len(part)) for flag, part in zip(flags, parts, strict=True)]
    # Only the last part needs padding: the others end at a multiple of 4 bytes.
    return b"".join(map(bytes.__add__, heads, parts)) + bytes(-len(record) % 4)


def _find_magic(content: bytes, start: int = 0) -> int:
    """Return the first place of the magic number from `start` on, a multiple of 4; -1 if there is none."""
    found = content.find(MAGIC, start)
    while found % 4 and found >= 0:
        found = content.find(MAGIC, found + 1)
    return found


def read_records(stream: BinaryIO, start: int, stop: int) -> Iterator[tuple[int, bytes | BadSampleError]]:
    """Yield the offset of each record that starts in a range of a file, with its content or the error of reading it.

    Adjacent ranges yield each record exactly once. After an error, reading continues at the next start of a record.

    Args:
        stream: the file, positioned at `start`.
        start: offset of the range, a multiple of 4 bytes.
        stop: offset at which the range ends; a record may extend beyond it.
    """
    file = _PartStream(stream, start)
    if start:
        # These bytes belong to a record of the previous range, which also reports damage in them.
        file.skip_to_start()
    while (head := file.peek()) and (file.offset < stop or _flag(head) in _CONTINUATIONS):
        offset = file.offset
        try:
            record = _read_record(file)
        except BadSampleError as error:
            file.skip_to_start()
            reason = f"{error}; bytes {offset} to {file.offset} are left out: copy the file again"
            yield offset, BadSampleError(reason)
        else:
            yield offset, record


class _PartStream:
    """The bytes of a file from `offset` to its end; the next ones can be looked at before they are read."""

    def __init__(self, stream: BinaryIO, offset: int) -> None:
        self.offset = offset
        self._stream = stream
        self._unread = b""

    def peek(self, length: int = _HEADER.size) -> bytes:
        """Return at least `length` of the next bytes, fewer where the file ends, without moving."""
        if len(self._unread) < length:
            self._unread += read_up_to(self._stream, length - len(self._unread))
        return self._unread

    def read(self, length: int) -> bytes:
        """Return the next `length` bytes, fewer where the file ends."""
        content, self._unread = self._unread[:length], self._unread[length:]
        if len(content) < length:
            content += read_up_to(self._stream, length - len(content))
        self.offset += len(content)
        return content

    def take_back(self, content: bytes) -> None:
        """Move back by the end of what was read last."""
        self._unread = content + self._unread
        self.offset -= len(content)

    def skip_to_start(self) -> None:
        """Move to the next part that starts a record, or to the end of the file."""
        while len(head := self.peek()) >= _HEADER.size:
            if self.offset % 4 == 0 and _flag(head) in _STARTS:
                return
            ahead = self.peek(_SCAN_BYTES)
            found = ahead.find(MAGIC, 1)
            # The last 3 bytes may be the start of a magic number.
            self.read(found if found > 0 else len(ahead) - 3)
        self.read(_HEADER.size)


def _flag(head: bytes) -> int | None:
    """Return the flag in the header of a part; None if there is no header."""
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        return None
    return int(_HEADER.unpack_from(head)[1]) >> _LENGTH_BITS


def _read_record(file: _PartStream) -> bytes:
    """Read and return the record at the offset of `file`. Raise BadSampleError if it is damaged or too large."""
    parts: list[bytes] = []
    size_bytes = -len(MAGIC)
    flag: int | None = _FIRST
    while flag in (_FIRST, _MIDDLE):
        flag, expected = _flag(file.peek()), _CONTINUATIONS if parts else _STARTS
        if flag not in expected:
            # It is not read, because it may be the start of an intact record.
            flags = " or ".join(map(str, expected))
            raise BadSampleError(f"expected the magic number of a part and the flag {flags} at byte {file.offset}")
        length = _HEADER.unpack(file.read(_HEADER.size))[1] & MAX_RECORD_BYTES
        size_bytes += len(MAGIC) + length
        if size_bytes > MAX_SAMPLE_BYTES:
            raise BadSampleError(f"it has {size_bytes} bytes; expected at most {MAX_SAMPLE_BYTES}")
        padding = -length % 4
        content = file.read(length + padding)
        if (found := _find_magic(content)) >= 0:
            # It is the start of the next part, which may be that of an intact record.
            file.take_back(content[found:])
            raise BadSampleError(f"its length is wrong: another part starts inside of it, at byte {file.offset}")
        if len(content) < length + padding:
            raise BadSampleError(f"the file ends at byte {file.offset}, inside of {length} bytes")
        parts.append(content[:length])
    # A length that is too small shows only here. A file that ends in the next header is an error of the next record.
    if not MAGIC.startswith(file.peek()[: len(MAGIC)]):
        raise BadSampleError(f"its length is wrong: no record starts at its end, byte {file.offset}")
    return MAGIC.join(parts)
