"""Finds record batches of Arrow files that would fill the memory: 12 kB may hold 2 GiB of compressed zeros.

Arrow decompresses a batch as a whole, and allocates what each buffer announces in its first 8 bytes. pyarrow does not
offer these numbers, so the messages are parsed here: tables of FlatBuffers, see Message.fbs and File.fbs of Arrow.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

_MAX_BATCH_BYTES: Final = 256 << 20
_MAX_RATIO: Final = 200  # as for Parquet: ordinary data is compressed to a tenth
_DICTIONARY, _BATCH = 2, 3  # types of messages
_TRAILER_BYTES: Final = 10  # of a file: length of the footer, and the magic bytes
_CONTINUATION: Final = 0xFFFFFFFF


def largest_batch(content: memoryview, *, is_file: bool) -> int | None:
    """Return the bytes of a batch, or of all dictionaries, that are too large for the file; None if there are none.

    Messages that cannot be parsed end the search: Arrow reports them.

    Args:
        content: the whole content.
        is_file: whether it is an IPC file with a footer; otherwise it is a stream.
    """
    limit, dictionary_bytes = max(_MAX_BATCH_BYTES, _MAX_RATIO * len(content)), 0
    try:
        for offset in _blocks(content) if is_file else _stream(content):
            kind, num_bytes = _announced(content, offset)
            # All dictionaries are in memory together, but one batch at a time.
            dictionary_bytes += num_bytes if kind == _DICTIONARY else 0
            if max(num_bytes, dictionary_bytes) > limit:
                return max(num_bytes, dictionary_bytes)
    except (struct.error, IndexError, ValueError):
        return None
    return None


def _blocks(content: memoryview) -> Iterator[int]:
    """Yield the offset of each dictionary and batch that the footer of a file names."""
    (length,) = struct.unpack_from("<i", content, len(content) - _TRAILER_BYTES)
    footer = content[len(content) - _TRAILER_BYTES - length : len(content) - _TRAILER_BYTES]
    root = _indirect(footer, 0)
    for field in (2, 3):  # dictionaries, record batches
        for start in _vector(footer, _field(footer, root, field), 24):
            yield struct.unpack_from("<q", footer, start)[0]


def _stream(content: memoryview) -> Iterator[int]:
    """Yield the offset of each message of a stream."""
    offset = 0
    while offset + 8 <= len(content):
        yield offset
        message, body = _message(content, offset)
        field = _field(message, _indirect(message, 0), 3)
        body_bytes = struct.unpack_from("<q", message, field)[0] if field else 0  # a default is left out
        if body_bytes < 0:
            raise ValueError(body_bytes)
        offset = body + body_bytes


def _message(content: memoryview, offset: int) -> tuple[memoryview, int]:
    """Return the metadata of the message at `offset`, and the offset of its body."""
    if offset < 0:
        raise ValueError(offset)
    mark, length = struct.unpack_from("<II", content, offset)
    # Before version 0.15 of Arrow, messages began with their length.
    start, length = (offset + 8, length) if mark == _CONTINUATION else (offset + 4, mark)
    if not length:
        raise ValueError("end of the stream")
    return content[start : start + length], start + length


def _announced(content: memoryview, offset: int) -> tuple[int, int]:
    """Return the type of a message, and the bytes that its compressed buffers announce."""
    message, body = _message(content, offset)
    root = _indirect(message, 0)
    kind, header = message[_field(message, root, 1)], _indirect(message, _field(message, root, 2))
    if kind == _DICTIONARY:
        header = _indirect(message, _field(message, header, 1))
    elif kind != _BATCH:
        return kind, 0
    if not _field(message, header, 3):  # no compression
        return kind, 0
    num_bytes = 0
    for start in _vector(message, _field(message, header, 2), 16):
        at, length = struct.unpack_from("<qq", message, start)
        if length >= 8 and at >= 0:
            num_bytes += max(0, struct.unpack_from("<q", content, body + at)[0])  # -1: not compressed
    return kind, num_bytes


def _indirect(table: memoryview, position: int) -> int:
    return position + int(struct.unpack_from("<I", table, position)[0])


def _field(table: memoryview, position: int, number: int) -> int:
    """Return the position of a field of the table at `position`; 0 if it is absent."""
    entries = position - struct.unpack_from("<i", table, position)[0]
    if entries < 0 or 4 + 2 * number >= struct.unpack_from("<H", table, entries)[0]:
        return 0
    (offset,) = struct.unpack_from("<H", table, entries + 4 + 2 * number)
    return position + int(offset) if offset else 0


def _vector(table: memoryview, position: int, item_bytes: int) -> range:
    """Return the positions of the items of a vector; `position` is that of its field, 0 for none."""
    if not position:
        return range(0)
    start = _indirect(table, position)
    (length,) = struct.unpack_from("<I", table, start)
    if length * item_bytes > len(table):
        raise ValueError(length)
    return range(start + 4, start + 4 + length * item_bytes, item_bytes)
