"""Choose how a terminal shows images: by kitty's protocol, as sixels, as coloured half blocks, or not at all."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Mapping
from typing import Final, Literal, TypeGuard, get_args

from rich.console import Console

from datasvc.errors import ConfigError

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
        if select.select([keyboard], [], [], 0)[0]:
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
        if select.select([keyboard], [], [], left_s)[0]:
            answer += os.read(keyboard, 1)  # by byte: what follows the answer is for the next reader
    return answer


def _is_protocol(text: str) -> TypeGuard[ImageProtocol]:
    return text in get_args(ImageProtocol)
