"""Encode images for terminals that draw pixels: the graphics protocol of kitty, and sixel."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
from PIL import Image

_MAX_KITTY_CHUNK = 4096  # base64 characters, https://sw.kovidgoyal.net/kitty/graphics-protocol
_MAX_COLOURS = 256  # as many registers as every sixel terminal but the oldest has
_BAND_ROWS = 6  # one character of sixel data is a column of six pixels
_NO_PIXEL = ord("?")  # the character of a column without pixels; the six bits are added to it
_RUN = re.compile(r"(.)\1{3,}")


def encode_kitty(image: Image.Image) -> str:
    """Return the escape sequences that draw an image in kitty's protocol, at the position of the cursor."""
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG")
    text = base64.b64encode(file.getvalue()).decode("ascii")
    chunks = [text[start : start + _MAX_KITTY_CHUNK] for start in range(0, len(text), _MAX_KITTY_CHUNK)]
    # a=T: send and draw; f=100: PNG; q=2: the terminal must not answer, because nothing reads its answer.
    controls = ["a=T,f=100,q=2," if chunk is chunks[0] else "" for chunk in chunks]
    more = [int(chunk is not chunks[-1]) for chunk in chunks]
    return "".join(
        f"\x1b_G{control}m={is_more};{chunk}\x1b\\"
        for control, is_more, chunk in zip(controls, more, chunks, strict=True)
    )


def encode_sixel(image: Image.Image) -> str:
    """Return the escape sequence that draws an image as sixels, reduced to 256 colours.

    The format is that of DEC's VT330/VT340 manual: https://vt100.net/docs/vt3xx-gp/chapter14.html.
    """
    # The octree takes half a millisecond for a thumbnail, the median cut half a second, and is not seen to be better.
    reduced = image.convert("RGB").quantize(_MAX_COLOURS, Image.Quantize.FASTOCTREE)
    indices = np.asarray(reduced)
    palette = np.asarray(reduced.getpalette(), np.int64).reshape(-1, 3)[: int(indices.max()) + 1]
    percent = (palette * 100 + 127) // 255
    colours = "".join(f"#{number};2;{red};{green};{blue}" for number, (red, green, blue) in enumerate(percent))
    bands = (indices[start : start + _BAND_ROWS] for start in range(0, len(indices), _BAND_ROWS))
    # `1;1;W;H`: square pixels, and the size, so that a terminal makes room for the image at once.
    return f'\x1bPq"1;1;{reduced.width};{reduced.height}{colours}{"-".join(map(_encode_band, bands))}\x1b\\'


def _encode_band(band: np.ndarray) -> str:
    """Return up to six rows as sixel data: for each colour, the columns where it is, then back to the left (`$`)."""
    columns = np.full((_MAX_COLOURS, band.shape[1]), _NO_PIXEL, np.uint8)
    for row, colours in enumerate(band):
        columns[colours, np.arange(len(colours))] += 1 << row  # bit 0 is the topmost pixel
    return "$".join(f"#{colour}{_shorten_runs(columns[colour].tobytes())}" for colour in np.unique(band))


def _shorten_runs(characters: bytes) -> str:
    """Return sixel characters with runs of equal ones as `!LENGTH CHARACTER`, without empty ones at the end."""
    text = characters.decode("ascii").rstrip(chr(_NO_PIXEL))
    return _RUN.sub(lambda run: f"!{len(run[0])}{run[1]}", text)
