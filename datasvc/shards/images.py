"""What can be said of an encoded image without decoding it, and whether it decodes at all.

Pillow parses the headers of every common format. It is lenient about missing ends, which a decoder on the way to
a GPU is not, so the end of a file is looked at here; where it says nothing, the image is decoded.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

from datasvc.errors import BadSampleError

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"})

_ORIENTATION = 0x0112  # EXIF tag; values 5 to 8 swap width and height
_SIZES_UPRIGHT = frozenset({"TIFF"})  # formats whose sizes Pillow turns itself
_END_OF_IMAGE, _START_OF_SCAN = b"\xff\xd9", 0xDA


@dataclass(frozen=True)
class ImageHeader:
    """Kind and size of an image.

    Attributes:
        kind: Pillow's name of the format, "JPEG".
        width: pixels after the EXIF rotation.
        height: likewise.
    """

    kind: str
    width: int
    height: int


def read_header(content: bytes | memoryview, *, decode: bool = False) -> ImageHeader:
    """Check an encoded image and return its header.

    Args:
        content: the whole file.
        decode: also decode every pixel, which takes some hundred times longer.

    Raises:
        BadSampleError: empty, no image, truncated, or absurdly large; says which.
    """
    if not len(content):
        raise BadSampleError("empty file")
    try:
        with Image.open(io.BytesIO(content)) as image:
            kind, (width, height) = image.format or "?", image.size
            if _is_turned(image):
                width, height = height, width
            if decode or not _is_complete(kind, content):
                image.load()
    except UnidentifiedImageError as error:
        raise BadSampleError(f"no image: it starts with {bytes(content[:16])!r}") from error
    except Image.DecompressionBombError as error:
        raise BadSampleError(str(error)) from error
    except (OSError, SyntaxError, ValueError) as error:
        raise BadSampleError(f"does not decode: {error}") from error
    return ImageHeader(kind, width, height)


def _is_turned(image: Image.Image) -> bool:
    if image.format in _SIZES_UPRIGHT:
        return False
    if image.format == "PNG" and "exif" not in image.info:
        return False  # Pillow would decode the whole file to look for it behind the pixels
    orientation = image.getexif().get(_ORIENTATION)
    return isinstance(orientation, int) and 5 <= orientation <= 8


def _is_complete(kind: str, content: bytes | memoryview) -> bool:
    """Return whether the end of the file proves that nothing is cut off; where it cannot, decode to find out."""
    raw = bytes(content)
    if kind == "JPEG":
        return raw.rfind(_END_OF_IMAGE, _scan_offset(raw)) > 0
    if kind == "PNG":
        return b"IEND" in raw[-64:]
    if kind == "WEBP":
        return len(raw) >= int.from_bytes(raw[4:8], "little") + 8
    return False


def _scan_offset(raw: bytes) -> int:
    """Return where a JPEG's pixels start, behind the headers, whose thumbnails have end markers of their own."""
    offset = 2
    while offset + 4 <= len(raw) and raw[offset] == 0xFF and raw[offset + 1] != _START_OF_SCAN:
        offset += 2 + int.from_bytes(raw[offset + 2 : offset + 4], "big")
    return offset
