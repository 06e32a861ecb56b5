"""Draw images in a terminal, for `datasvc head`: as pixels where it has them, else as half blocks.

One half block shows two pixels: the upper one in its foreground colour, the lower one in its background colour.
"""

from __future__ import annotations

import numpy as np
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from datasvc.cli.terminal.image_protocol import ImageProtocol
from datasvc.cli.terminal.pixel_graphics import encode_kitty, encode_sixel

_MAX_BLOCKS = 40
_MAX_PIXELS = 240
_UPPER_HALF = "\N{UPPER HALF BLOCK}"


def max_side(protocol: ImageProtocol, console: Console) -> int:
    """Return the largest useful side of an image, in pixels."""
    return min(_MAX_BLOCKS, console.width) if protocol == "blocks" else _MAX_PIXELS


def print_image(image: Image.Image, protocol: ImageProtocol, console: Console) -> None:
    """Draw an image on the next lines of a console; nothing with the protocol "none"."""
    if protocol == "blocks":
        console.print(draw_blocks(image))
    elif protocol != "none":
        encode = encode_kitty if protocol == "kitty" else encode_sixel
        # Not through `print`, which would take the data for text and break its lines.
        console.file.write(f"{encode(_enlarge(image))}\n")
        console.file.flush()


def draw_blocks(image: Image.Image) -> Text:
    """Return an image as lines of half-block characters: one column per pixel, one line per two rows of pixels."""
    pixels = np.asarray(image.convert("RGB"))
    if len(pixels) % 2:  # the last line lacks its lower row of pixels: add a black row
        pixels = np.concatenate([pixels, np.zeros_like(pixels[:1])])
    lines = (
        Text.assemble(*[(_UPPER_HALF, _style(upper[x], lower[x])) for x in range(len(upper))])
        for upper, lower in zip(pixels[::2], pixels[1::2], strict=True)
    )
    return Text("\n").join(lines)


def _enlarge(image: Image.Image) -> Image.Image:
    """Return a small image enlarged by a whole factor, because an icon of 8x8 pixels cannot be seen."""
    factor = max(1, _MAX_PIXELS // 2 // max(image.size))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _style(upper: np.ndarray, lower: np.ndarray) -> Style:
    return Style(color=Color.from_rgb(*upper.tolist()), bgcolor=Color.from_rgb(*lower.tolist()))
