"""Decoding of complete images with Pillow for users' transforms: upright, 8-bit RGB.

`Dataset` uses it for its argument `decode`. `ImageLoader` has other decoders, which decode only windows.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from PIL import Image

from datasvc.shards.images.exif import read_orientation, turn_upright
from datasvc.shards.images.header import open_image, to_rgb

Decode = Literal["pil", "numpy"] | None


def decode_image(content: bytes, decode: Decode) -> Any:
    """Return an encoded image as `PIL.Image`, or as `uint8[height, width, 3]` for "numpy".

    Raises:
        BadSampleError: the image does not decode.
    """
    with open_image(content) as opened:
        kind = opened.format or ""
        upright = to_rgb(turn_upright(opened, read_orientation(content, kind)), kind)
        # Pillow decodes when pixels are needed. Decode now, because `open_image` converts errors inside this block.
        upright.load()
    return upright if decode == "pil" else np.array(upright)


def black_image(width: int, height: int, decode: Decode) -> Any:
    """Return a black image in place of one that does not decode. The size is in the sample's columns."""
    return Image.new("RGB", (width, height)) if decode == "pil" else np.zeros((height, width, 3), np.uint8)
