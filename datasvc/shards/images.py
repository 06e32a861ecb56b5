"""What can be said of an encoded image without decoding it, and whether it decodes at all.

Pillow parses the headers of every common format. It is lenient about missing ends, which a decoder on the way to
a GPU is not, so the end of a JPEG is looked at here.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

from datasvc.errors import BadSampleError

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"})

_ORIENTATION = 0x0112  # EXIF tag; values 5 to 8 swap width and height
# Cameras pad a JPEG after its end marker; a megabyte of padding is damage.
_JPEG_TRAILER_BYTES = 1 << 20
_MAX_PIXELS = 1 << 28


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
            if width * height > _MAX_PIXELS:
                raise BadSampleError(f"{width}x{height} pixels; at most {_MAX_PIXELS} are accepted")
            if _is_turned(image):
                width, height = height, width
            if decode:
                image.load()
    except UnidentifiedImageError as error:
        raise BadSampleError(f"no image: it starts with {bytes(content[:16])!r}") from error
    except Image.DecompressionBombError as error:
        raise BadSampleError(str(error)) from error
    except (OSError, SyntaxError, ValueError) as error:
        raise BadSampleError(f"does not decode: {error}") from error
    if kind == "JPEG" and bytes(content).rfind(b"\xff\xd9", max(0, len(content) - _JPEG_TRAILER_BYTES)) < 0:
        raise BadSampleError("truncated JPEG: no end marker")
    return ImageHeader(kind, width, height)


def _is_turned(image: Image.Image) -> bool:
    if image.format == "PNG" and "exif" not in image.info:
        return False  # Pillow would decode the whole file to look for it behind the pixels
    return int(image.getexif().get(_ORIENTATION, 1)) >= 5
