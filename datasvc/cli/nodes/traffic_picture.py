"""The traffic of a node as a picture, for terminals that draw pixels (`datasvc top`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from PIL import Image, ImageDraw
from rich.console import Console

from datasvc.cli.terminal.image_protocol import ImageProtocol
from datasvc.cli.terminal.pixel_graphics import encode_kitty, encode_sixel
from datasvc.drawing.colours import colour_values
from datasvc.sizes import format_size

_SIZE: Final = (640, 140)
_MARGIN: Final = 20
NUM_LINES: Final = 9
"""Lines of text that the picture may cover: a line of a terminal has 16 pixels or more."""
_DELETE_KITTY: Final = "\x1b_Ga=d,q=2\x1b\\"  # pictures of earlier readings would stay


def draw_traffic(rates: Sequence[Mapping[str, float]], labels: Mapping[str, str]) -> Image.Image:
    """Return a line for each counter over the readings, oldest on the left; the top is the highest rate.

    Args:
        rates: bytes per second by counter, at least one reading.
        labels: text of each counter that is drawn.
    """
    image = Image.new("RGB", _SIZE, "#16191d")
    canvas = ImageDraw.Draw(image)
    width, height = _SIZE[0] - 2 * _MARGIN, _SIZE[1] - 2 * _MARGIN
    highest = max(reading[name] for reading in rates for name in labels)
    canvas.text((_MARGIN, 4), f"up to {format_size(highest)}/s", fill="#e6e8ea")
    for number, (name, label) in enumerate(labels.items()):
        colour = colour_values(f"c{number}")[1]
        points = [
            (
                _MARGIN + width * index / max(1, len(rates) - 1),
                _MARGIN + height * (1 - reading[name] / highest if highest else 1),
            )
            for index, reading in enumerate(rates)
        ]
        canvas.line(points if len(points) > 1 else 2 * points, fill=colour, width=2)
        canvas.text((_MARGIN + 140 * number, _SIZE[1] - _MARGIN + 4), label, fill=colour)
    return image


def show_below(console: Console, num_lines: int, image: Image.Image, protocol: ImageProtocol) -> None:
    """Draw a picture below the first `num_lines` lines of a screen, if it draws pixels and has room."""
    if protocol not in {"kitty", "sixel"} or num_lines + NUM_LINES > console.height:
        return
    data = _DELETE_KITTY + encode_kitty(image) if protocol == "kitty" else encode_sixel(image)
    console.file.write(f"\x1b[{num_lines + 1};1H{data}")
    console.file.flush()
