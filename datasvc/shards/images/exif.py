"""EXIF orientation of an encoded image: the rotation or flip that makes it upright, read from the file's bytes.

Shards store width and height of the upright image, and crops are chosen in that image. DALI applies the orientation
itself before it cuts the crop. So this module must find the same orientation as DALI: from the last EXIF block of a
JPEG, the `eXIf` chunk of a PNG at any position, or the `EXIF` chunk of a WebP. XMP and the text chunks of old PNGs,
which Pillow would use too, are ignored. The image is not decoded.

Source of the values: EXIF 2.32 (CIPA DC-008-2019), 4.6.4 A, tag 0x0112.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final, Literal

from PIL import Image

from datasvc.shards.images.jpeg_segments import jpeg_segments

_UPRIGHT: Final = 1
_ORIENTATION_TAG = 0x0112
_SHORT, _LONG = 3, 4  # types of a tag's value: 2 or 4 bytes
_EXIF_PREFIX: Final = b"Exif\0\0"
_APP1: Final = 0xE1
_RIFF_CHUNK: Final = struct.Struct("<4sI")  # name, length of the data, which is padded to an even length
# The operation that makes an image of each orientation upright. Orientation 1 is upright already.
_TRANSPOSES: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_HEADER: Final = struct.Struct(">I4s")  # length of the data, name; data and checksum follow
_CHECKSUM_BYTES: Final = 4
_MAX_TEXT_BYTES: Final = 1 << 20  # Pillow's limit for one chunk of text or profile
_TEXTS: Final = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")


def read_orientation(content: bytes | memoryview, kind: str) -> int:
    """Return the orientation of an encoded image, 1 to 8; 1 without a valid EXIF orientation.

    Args:
        content: the complete file.
        kind: its format by Pillow's name. TIFF, which Pillow itself rotates, and formats without EXIF give 1.
    """
    raw = memoryview(content).cast("B")
    orientation = _UPRIGHT
    for block in _exif_blocks(raw, kind):
        # The last block decides, as in DALI: an invalid one means upright, whatever the earlier blocks contain.
        orientation = parse_orientation(block) or _UPRIGHT
    return orientation


def parse_orientation(tiff: memoryview) -> int | None:
    """Return the orientation in an EXIF block's TIFF data, 1 if it has none; None if the TIFF header is invalid."""
    byte_order_mark = bytes(tiff[:2])
    if byte_order_mark not in (b"II", b"MM"):
        return None
    byte_order: Literal["little", "big"] = "little" if byte_order_mark == b"II" else "big"

    def read_number(offset: int, length: int) -> int:
        return int.from_bytes(tiff[offset : offset + length], byte_order)

    # A TIFF header has the byte order, the number 42, and the offset of the first directory.
    directory = read_number(4, 4)
    if read_number(2, 2) != 42 or not 8 <= directory <= len(tiff) - 2:
        return None
    num_entries = read_number(directory, 2)
    if directory + 2 + 12 * num_entries > len(tiff):
        return None
    # An entry of the directory has 12 bytes: tag, type, number of values, value.
    for offset in range(directory + 2, directory + 2 + 12 * num_entries, 12):
        if read_number(offset, 2) == _ORIENTATION_TAG:
            value_type = read_number(offset + 2, 2)
            # The field has 4 bytes in both byte orders; a short value fills the first two.
            value = read_number(offset + 8, 2 if value_type == _SHORT else 4)
            return value if value_type in (_SHORT, _LONG) and value in range(1, 9) else _UPRIGHT
    return _UPRIGHT


def swaps_sides(orientation: int) -> bool:
    """Return whether the upright image has the width and height of the stored image swapped."""
    return orientation >= 5  # 1 to 4 are flips and half turns; 5 to 8 include a quarter turn or a transposition


def turn_upright(image: Image.Image, orientation: int) -> Image.Image:
    """Return the upright image for a result of `read_orientation`; the same object if it is upright already."""
    method = _TRANSPOSES.get(orientation)
    return image if method is None else image.transpose(method)


def _exif_blocks(raw: memoryview, kind: str) -> Iterator[memoryview]:
    """Yield the TIFF data of each EXIF block in the order of the file."""
    if kind in ("JPEG", "MPO"):
        segments = (raw[start:stop] for marker, start, stop in jpeg_segments(raw) if marker == _APP1)
        blocks = (data for data in segments if _has_exif_prefix(data))  # others contain XMP
    elif kind == "PNG":
        blocks = (data for name, data, _ in png_chunks(raw) if name == b"eXIf")
    elif kind == "WEBP":
        blocks = (data for name, data in _riff_chunks(raw) if name == b"EXIF")
    else:
        return
    # The prefix of a JPEG's block may also be present in the chunk of a PNG or WebP.
    for block in blocks:
        yield block[len(_EXIF_PREFIX) :] if _has_exif_prefix(block) else block


def _has_exif_prefix(block: memoryview) -> bool:
    return bytes(block[: len(_EXIF_PREFIX)]) == _EXIF_PREFIX


def _riff_chunks(raw: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    offset = 12  # after "RIFF", the size of the file, and "WEBP"
    while offset + _RIFF_CHUNK.size <= len(raw):
        name, length = _RIFF_CHUNK.unpack_from(raw, offset)
        offset += _RIFF_CHUNK.size
        yield name, raw[offset : offset + length]
        offset += length + length % 2


# Pillow raises an error for text or a colour profile of more than 1 MiB, and for a wrong checksum of any chunk, also
# of one that is not needed to decode the pixels. Such an error hides an intact picture.


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
