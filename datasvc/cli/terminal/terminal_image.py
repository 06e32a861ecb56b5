"""Draw images in a terminal, for `datasvc head` and `top`: as pixels where it has them, else as half blocks.

One half block shows two pixels: the upper one in its foreground colour, the lower one in its background colour.
"""

from __future__ import annotations

import base64
import io
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Mapping
from typing import Final, Literal, TypeGuard, get_args

import numpy as np
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from datasvc.errors import ConfigError

_MAX_BLOCKS = 40
_MAX_PIXELS = 240
_UPPER_HALF = "\N{UPPER HALF BLOCK}"


_MAX_KITTY_CHUNK = 4096  # base64 characters, https://sw.kovidgoyal.net/kitty/graphics-protocol
_MAX_COLOURS = 256  # as many registers as every sixel terminal but the oldest has
_BAND_ROWS = 6  # one character of sixel data is a column of six pixels
_NO_PIXEL = ord("?")  # the character of a column without pixels; the six bits are added to it
_RUN = re.compile(r"(.)\1{3,}")


ImageProtocol = Literal["kitty", "sixel", "blocks", "none"]

VARIABLE: Final = "DATASVC_IMAGES"
"""Name of the environment variable that chooses the protocol."""

# Terminals that have kitty's protocol, by the start of TERM and by TERM_PROGRAM.
_KITTY_TERMS: Final = ("xterm-kitty", "xterm-ghostty")
_KITTY_PROGRAMS: Final = ("ghostty",)
_MULTIPLEXED_TERMS: Final = ("screen", "tmux")

_ATTRIBUTES_QUERY: Final = b"\x1b[c"  # primary device attributes (DA1)
_ATTRIBUTES: Final = re.compile(rb"\x1b\[\?([\d;]*)c")
_SIXEL_ATTRIBUTE: Final = b"4"
_ANSWER_TIMEOUT_S: Final = 1.0


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


def choose_protocol(
    console: Console,
    environment: Mapping[str, str] = os.environ,
    has_sixel: Callable[[], bool] | None = None,
) -> ImageProtocol:
    """Return how to draw images on a console. "none" if it is not a terminal.

    Args:
        console: where the images are drawn.
        environment: variables; `DATASVC_IMAGES` has precedence over what is detected.
        has_sixel: asks the terminal whether it draws sixels; default: by `query_sixel`.

    Raises:
        ConfigError: `DATASVC_IMAGES` names no protocol.
    """
    wanted = environment.get(VARIABLE, "")
    if wanted and not _is_protocol(wanted):
        expected = ", ".join(get_args(ImageProtocol))
        raise ConfigError(f"{VARIABLE} is {wanted!r}; expected one of {expected}, or leave it unset")
    if not console.is_terminal:
        return "none"
    if wanted:
        return wanted
    if console.color_system is None:
        return "none"
    term = environment.get("TERM", "")
    # A multiplexer draws its own screen from text: pixels would be lost, or stay when it scrolls.
    if {"TMUX", "STY"} & set(environment) or term.startswith(_MULTIPLEXED_TERMS):
        return "blocks"
    is_kitty = term.startswith(_KITTY_TERMS) or environment.get("TERM_PROGRAM") in _KITTY_PROGRAMS
    if is_kitty or "KITTY_WINDOW_ID" in environment:
        return "kitty"
    return "sixel" if (has_sixel or query_sixel)() else "blocks"


def query_sixel(timeout_s: float = _ANSWER_TIMEOUT_S) -> bool:
    """Ask the terminal of this process for its attributes, and return whether sixels are among them.

    False if standard input or output is not a terminal, if input is waiting (it would be lost), or after `timeout_s`.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    keyboard, screen = sys.stdin.fileno(), sys.stdout.fileno()
    if _is_in_background(keyboard):
        return False  # the kernel would stop this process for changing the terminal of another
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard, termios.TCSANOW)  # the answer has no line end, and must not be shown
        if select.select([keyboard], [], [], 0)[0]:  # noqa: TID251 - standard input
            return False
        os.write(screen, _ATTRIBUTES_QUERY)
        found = _ATTRIBUTES.search(_read_answer(keyboard, timeout_s))
    finally:
        termios.tcsetattr(keyboard, termios.TCSANOW, before)
    return found is not None and _SIXEL_ATTRIBUTE in found[1].split(b";")


def _is_in_background(terminal: int) -> bool:
    try:
        return os.tcgetpgrp(terminal) != os.getpgrp()
    except OSError:  # not the terminal of this session
        return False


def _read_answer(keyboard: int, timeout_s: float) -> bytes:
    """Return what arrives until an answer is complete, or until `timeout_s` have passed."""
    answer = b""
    end = time.monotonic() + timeout_s
    while not _ATTRIBUTES.search(answer) and (left_s := end - time.monotonic()) > 0:
        if select.select([keyboard], [], [], left_s)[0]:  # noqa: TID251 - standard input
            answer += os.read(keyboard, 1)  # by byte: what follows the answer is for the next reader
    return answer


def _is_protocol(text: str) -> TypeGuard[ImageProtocol]:
    return text in get_args(ImageProtocol)
