"""Small copies of images for display. What is shown is always re-encoded, never the bytes of a sample."""

from __future__ import annotations

import io

from PIL import Image, ImageOps

from datasvc.errors import BadSampleError
from datasvc.shards.images.header import open_image, to_rgb


def thumbnail(encoded: bytes, max_side: int, *, max_pixels: int | None = None) -> Image.Image:
    """Return an image as RGB, upright, with neither side longer than `max_side` pixels.

    Args:
        encoded: the encoded image.
        max_side: pixels.
        max_pixels: limit of the pixels to decode, against images that are made to fill the memory; None: Pillow's.

    Raises:
        BadSampleError: `encoded` is not an image, has too many pixels, or does not decode.
    """
    with open_image(encoded) as image:
        image.draft("RGB", (max_side, max_side))  # a JPEG is decoded at a smaller scale, which is faster
        width, height = image.size
        if max_pixels is not None and width * height > max_pixels:
            raise BadSampleError(f"too large: {width} x {height} pixels, expected at most {max_pixels:,} in all")
        upright = to_rgb(ImageOps.exif_transpose(image), image.format or "")
    upright.thumbnail((max_side, max_side))
    return upright


def png_thumbnail(encoded: bytes, max_side: int) -> bytes:
    """Return `thumbnail` as a PNG file. Raise BadSampleError."""
    file = io.BytesIO()
    thumbnail(encoded, max_side).save(file, "PNG")
    return file.getvalue()
