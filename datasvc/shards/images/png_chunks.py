"""The chunks of a PNG: a copy of a file without the metadata that Pillow refuses, though the pixels are intact.

Pillow raises an error for text or a colour profile of more than 1 MiB, and for a wrong checksum of any chunk, also of
one that is not needed to decode the pixels. Such an error hides an intact picture.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final

SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_HEADER: Final = struct.Struct(">I4s")  # length of the data, name; data and checksum follow
_CHECKSUM_BYTES: Final = 4
_MAX_TEXT_BYTES: Final = 1 << 20  # Pillow's limit for one chunk of text or profile
_TEXTS: Final = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")


def png_chunks(raw: memoryview) -> Iterator[tuple[bytes, memoryview, int]]:
    """Yield name, data and offset of each chunk of a PNG; the data of a truncated one is shorter."""
    offset = len(SIGNATURE)
    while offset + _HEADER.size <= len(raw):
        length, name = _HEADER.unpack_from(raw, offset)
        start = offset + _HEADER.size
        yield name, raw[start : start + length], offset
        offset = start + length + _CHECKSUM_BYTES


def readable_png(content: bytes | memoryview) -> bytes | memoryview:
    """Return a file without the chunks that Pillow refuses and does not need; `content` itself if it has none.

    A file that is not a PNG is returned as it is. A wrong checksum of a chunk with pixels stays an error.
    """
    if bytes(content[: len(SIGNATURE)]) != SIGNATURE:
        return content
    raw = memoryview(content).cast("B")
    kept = [raw[: len(SIGNATURE)]]
    num_text_bytes = 0
    is_changed = False
    for name, data, offset in png_chunks(raw):
        stop = offset + _HEADER.size + len(data) + _CHECKSUM_BYTES
        is_ancillary = name[:1].islower()
        if is_ancillary and stop <= len(raw):
            checksum = int.from_bytes(raw[stop - _CHECKSUM_BYTES : stop], "big")
            num_text_bytes += _text_bytes(name, bytes(data)) if name in _TEXTS else 0
            if checksum != zlib.crc32(data, zlib.crc32(name)) or (
                name in _TEXTS and num_text_bytes > _MAX_TEXT_BYTES
            ):
                is_changed = True
                continue
        kept.append(raw[offset:stop])
    return b"".join(kept) if is_changed else content


def _text_bytes(name: bytes, data: bytes) -> int:
    """Return the size of a text or profile after decompression, up to a little more than the limit."""
    rest = data.partition(b"\0")[2]
    if name == b"tEXt" or (name == b"iTXt" and rest[:1] == b"\0"):
        return len(data)
    compressed = rest[2:].split(b"\0", 2)[-1] if name == b"iTXt" else rest[1:]
    try:
        return len(zlib.decompressobj().decompress(compressed, _MAX_TEXT_BYTES + 1))
    except zlib.error:
        return _MAX_TEXT_BYTES + 1
