"""Draw images in a terminal, for `datasvc head`.

One character shows two pixels: the upper one in its foreground colour, the lower one in its background colour.
"""

from __future__ import annotations

import numpy as np
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

_UPPER_HALF = "\N{UPPER HALF BLOCK}"


def can_draw(console: Console) -> bool:
    """Return whether the console is a terminal with colours."""
    return console.is_terminal and console.color_system is not None


def draw_image(image: Image.Image) -> Text:
    """Return an image as lines of half-block characters: one column per pixel, one line per two rows of pixels."""
    pixels = np.asarray(image.convert("RGB"))
    if len(pixels) % 2:  # the last line lacks its lower row of pixels: add a black row
        pixels = np.concatenate([pixels, np.zeros_like(pixels[:1])])
    lines = (
        Text.assemble(*[(_UPPER_HALF, _style(upper[x], lower[x])) for x in range(len(upper))])
        for upper, lower in zip(pixels[::2], pixels[1::2], strict=True)
    )
    return Text("\n").join(lines)


def _style(upper: np.ndarray, lower: np.ndarray) -> Style:
    return Style(color=Color.from_rgb(*upper.tolist()), bgcolor=Color.from_rgb(*lower.tolist()))
