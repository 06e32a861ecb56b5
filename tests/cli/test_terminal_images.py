"""Images on a terminal: which protocol is chosen, and what the terminal shows of it."""

import base64
import io
import os
import pty
import re
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from datasvc.cli.terminal.terminal_image import (
    choose_protocol,
    draw_blocks,
    encode_kitty,
    encode_sixel,
    print_image,
    query_sixel,
)
from datasvc.errors import ConfigError
from tests.support.odd_images import picture


def console_of(**options):
    """Return a console that is a terminal of 80 columns with all colours, unless `options` say otherwise."""
    options = {"force_terminal": True, "color_system": "truecolor", "width": 80, **options}
    return Console(file=io.StringIO(), legacy_windows=False, **options)


def decode_kitty(text):
    """Return the image that a terminal draws, and check the form of each chunk."""
    chunks = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", text)
    assert "".join(f"\x1b_G{control};{data}\x1b\\" for control, data in chunks) == text
    assert [control for control, _ in chunks] == [
        ("a=T,f=100,q=2," if not number else "") + f"m={int(number < len(chunks) - 1)}"
        for number in range(len(chunks))
    ]
    assert all(len(data) <= 4096 and len(data) % 4 == 0 for _, data in chunks)
    return np.asarray(Image.open(io.BytesIO(base64.b64decode("".join(data for _, data in chunks)))))


def decode_sixel(text):
    """Return the image that a terminal draws; pixels that were not drawn are -1."""
    width, height, data = re.fullmatch(r'\x1bPq"1;1;(\d+);(\d+)(.*)\x1b\\', text).groups()
    pixels, colours = np.full((int(height), int(width), 3), -1), {}
    left, top, colour = 0, 0, None
    for number, components, length, character in re.findall(r"#(\d+)((?:;\d+)*)|(?:!(\d+))?([?-~$-])", data):
        if number:
            colour = int(number)
            if components:
                colours[colour] = [round(int(part) * 2.55) for part in components.split(";")[2:]]
        elif character in "$-":
            left, top = 0, top + 6 * (character == "-")
        else:
            right = left + int(length or 1)
            for row in range(6):
                if (ord(character) - ord("?")) >> row & 1:
                    pixels[top + row, left:right] = colours[colour]
            left = right
    return pixels


def test_kitty_gets_the_image_itself():
    image = picture(200, 150)
    np.testing.assert_array_equal(decode_kitty(encode_kitty(image)), np.asarray(image))


@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    colours=st.lists(st.tuples(*[st.sampled_from(range(0, 256, 17))] * 3), min_size=1, max_size=9),
    seed=st.integers(0, 2**32 - 1),
)
def test_sixels_are_the_image_in_nearly_its_colours(shape, colours, seed):
    numbers = np.random.default_rng(seed).integers(0, len(colours), shape)
    pixels = np.array(colours, np.uint8)[numbers]
    decoded = decode_sixel(encode_sixel(Image.fromarray(pixels)))
    assert np.abs(decoded - pixels.astype(int)).max() <= 8


def test_a_photo_as_sixels_is_near_to_the_photo():
    image = picture(100, 80)
    difference = decode_sixel(encode_sixel(image)) - np.asarray(image, int)
    assert np.abs(difference).mean() < 12


KITTY, XTERM = {"TERM": "xterm-kitty", "KITTY_WINDOW_ID": "1"}, {"TERM": "xterm-256color"}


@pytest.mark.parametrize(
    ("environment", "has_sixel", "chosen"),
    [
        (KITTY, True, "kitty"),
        ({"TERM": "xterm-ghostty"}, False, "kitty"),
        ({**XTERM, "TERM_PROGRAM": "ghostty"}, False, "kitty"),
        ({**XTERM, "TERM_PROGRAM": "WezTerm"}, True, "sixel"),
        (XTERM, True, "sixel"),
        (XTERM, False, "blocks"),
        ({}, False, "blocks"),
        ({**KITTY, "TMUX": "/tmp/tmux-0/default,7,0"}, True, "blocks"),
        ({**XTERM, "STY": "7.pts-0"}, True, "blocks"),
        ({"TERM": "screen.xterm-256color"}, True, "blocks"),
        ({**XTERM, "DATASVC_IMAGES": ""}, True, "sixel"),
        ({**KITTY, "DATASVC_IMAGES": "none"}, True, "none"),
        ({**KITTY, "TMUX": "x", "DATASVC_IMAGES": "sixel"}, False, "sixel"),
        ({**XTERM, "DATASVC_IMAGES": "kitty"}, False, "kitty"),
    ],
)
def test_the_protocol_is_what_the_terminal_has_or_what_the_user_wants(environment, has_sixel, chosen):
    assert choose_protocol(console_of(), environment, lambda: has_sixel) == chosen
    assert choose_protocol(console_of(force_terminal=False), environment, lambda: has_sixel) == "none"


def test_a_terminal_without_colours_shows_images_only_if_the_user_says_how():
    assert choose_protocol(console_of(color_system=None), KITTY, lambda: True) == "none"
    assert choose_protocol(console_of(color_system=None), {"DATASVC_IMAGES": "kitty"}, lambda: True) == "kitty"


def test_a_wrong_protocol_is_a_clear_error():
    with pytest.raises(ConfigError, match="DATASVC_IMAGES is 'png'; expected one of kitty, sixel, blocks, none"):
        choose_protocol(console_of(), {"DATASVC_IMAGES": "png"})


@pytest.fixture
def terminal(monkeypatch):
    """A pseudo-terminal: the side of the person, that of the program, and a query there."""
    leader, follower = pty.openpty()
    with open(follower, "r+b", buffering=0) as program:

        def query(timeout_s=60):
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stdin", program)
                patch.setattr(sys, "stdout", program)
                return query_sixel(timeout_s)

        yield leader, program, query
    os.close(leader)


@pytest.mark.parametrize(
    ("answer", "has_sixel"), [(b"\x1b[?62;4;22c", True), (b"\x1b[?62;22;44c", False), (b"\x1b[?6c", False)]
)
def test_the_terminal_is_asked_for_sixels_and_its_answer_is_not_left_for_the_shell(terminal, answer, has_sixel):
    person, program, query = terminal
    asked = []

    def terminal_answers():
        asked.append(os.read(person, 3))
        os.write(person, answer + b"next\n")

    thread = threading.Thread(target=terminal_answers, daemon=True)
    thread.start()
    assert query() == has_sixel
    thread.join()
    assert asked == [b"\x1b[c"]
    assert program.readline() == b"next\n"


def test_a_terminal_that_does_not_answer_has_no_sixels(terminal):
    assert not terminal[2](timeout_s=0.01)


def test_what_was_typed_before_is_not_lost(terminal):
    person, program, query = terminal
    os.write(person, b"typed\n")
    assert not query()
    assert program.readline() == b"typed\n"


def test_nothing_is_asked_without_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert not query_sixel(timeout_s=60)


@pytest.mark.parametrize(("protocol", "decode"), [("kitty", decode_kitty), ("sixel", decode_sixel)])
def test_a_small_image_is_enlarged_where_pixels_are_drawn(protocol, decode):
    console, image = console_of(), picture(8, 6)
    print_image(image, protocol, console)
    shown = decode(console.file.getvalue().removesuffix("\n"))
    assert shown.shape == (90, 120, 3)
    assert np.abs(shown[7::15, 7::15] - np.asarray(image, int)).max() <= 8


def test_half_blocks_have_the_colours_of_the_pixels():
    pixels = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [9, 8, 7]], [[1, 2, 3], [4, 5, 6]]], np.uint8)
    console = console_of(width=20)
    console.print(draw_blocks(Image.fromarray(pixels)))
    shown = console.file.getvalue()
    half = "\N{UPPER HALF BLOCK}"
    assert f"\x1b[38;2;255;0;0;48;2;0;0;255m{half}" in shown
    assert f"\x1b[38;2;0;255;0;48;2;9;8;7m{half}" in shown
    assert f"\x1b[38;2;4;5;6;48;2;0;0;0m{half}" in shown  # an odd row has black below it
    assert (shown.count(half), shown.count("\n")) == (4, 2)
