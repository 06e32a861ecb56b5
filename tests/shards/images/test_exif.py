import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from datasvc.shards.images.exif import parse_orientation, read_orientation, swaps_sides, turn_upright
from datasvc.shards.images.header import read_header
from tests.support.odd_images import EXIF_TIFF, encode, exif, late_exif, picture

TURNS = range(1, 9)


def app1(data):
    return b"\xff\xe1" + struct.pack(">H", len(data) + 2) + data


def behind_start(jpeg, *segments):
    return jpeg[:2] + b"".join(segments) + jpeg[2:]


@pytest.mark.parametrize("turn", TURNS)
def test_the_tag_is_found_in_every_format_that_has_one(turn):
    image = picture()
    files = {
        "JPEG": encode(image, "JPEG", exif=exif(turn)),
        "MPO": encode(image, "JPEG", exif=exif(turn)),
        "PNG": encode(image, "PNG", exif=exif(turn)),
        "WEBP": encode(image, "WEBP", exif=exif(turn)),
    }
    assert {kind: read_orientation(content, kind) for kind, content in files.items()} == dict.fromkeys(files, turn)


@pytest.mark.parametrize("turn", TURNS)
def test_an_image_is_turned_as_the_standard_says(turn):
    """The standard names, for each value, the sides where the first row and the first column are."""
    stored = picture()
    first_row, first_column = {
        1: ("top", "left"), 2: ("top", "right"), 3: ("bottom", "right"), 4: ("bottom", "left"),
        5: ("left", "top"), 6: ("right", "top"), 7: ("right", "bottom"), 8: ("left", "bottom"),
    }[turn]  # fmt: skip
    upright, pixels = np.asarray(turn_upright(stored, turn)), np.asarray(stored)
    sides = {"top": upright[0], "bottom": upright[-1], "left": upright[:, 0], "right": upright[:, -1]}
    backwards = {"right", "bottom"}
    row, column = sides[first_row], sides[first_column]
    assert np.array_equal(row[::-1] if first_column in backwards else row, pixels[0])
    assert np.array_equal(column[::-1] if first_row in backwards else column, pixels[:, 0])
    assert swaps_sides(turn) == (upright.shape[:2] != pixels.shape[:2])


def test_a_tag_behind_the_pixels_of_a_png_counts():
    content = late_exif(encode(picture(), "PNG"), 6)
    assert read_orientation(content, "PNG") == 6
    for decode in (False, True):
        assert read_header(content, decode=decode)[1:] == (44, 60)


def test_of_several_tags_in_a_jpeg_the_last_counts():
    plain = encode(picture(), "JPEG")
    for first, last in ((6, 1), (1, 6)):
        content = behind_start(plain, app1(exif(first)), app1(exif(last)))
        for decode in (False, True):
            assert (read_header(content, decode=decode).width == 44) == (last == 6)


@pytest.mark.parametrize("decode", [False, True])
def test_orientations_outside_of_exif_are_ignored_with_and_without_decoding(decode):
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    text = PngImagePlugin.PngInfo()
    text.add_text("Raw profile type exif", f"\nexif\n{len(EXIF_TIFF):8}\n{(EXIF_TIFF % 6).hex()}\n", zip=True)
    for content in (
        encode(picture(), "JPEG", xmp=xmp),
        encode(picture(), "WEBP", xmp=xmp),
        encode(picture(), "PNG", pnginfo=text),
    ):
        assert read_header(content, decode=decode)[1:] == (60, 44)


@pytest.mark.parametrize("value", [0, 9, 255])
def test_values_outside_of_the_standard_are_upright(value):
    assert parse_orientation(memoryview(EXIF_TIFF % value)) == 1


@pytest.mark.parametrize(
    ("tiff", "expected"),
    [
        (b"MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0", 6),
        (b"II*\0\x08\0\0\0\1\0\x12\1\4\0\1\0\0\0\6\0\0\0\0\0\0\0", 6),  # a long integer
        (b"II*\0\x08\0\0\0\1\0\x12\1\2\0\1\0\0\0\6\0\0\0\0\0\0\0", 1),  # a text
        (b"II*\0\x08\0\0\0\1\0\x0f\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0", 1),  # another tag
        (b"II*\0\x08\0\0\0\5\0\x12\1\3\0\1\0\0\0\6\0\0\0", None),  # one of five entries
        (b"II*\0garbage", None),
        (b"XX*\0\x08\0\0\0", None),
        (b"", None),
    ],
)
def test_the_orientation_is_parsed_or_the_header_is_invalid(tiff, expected):
    assert parse_orientation(memoryview(tiff)) == expected


@given(st.binary(max_size=200), st.sampled_from(["JPEG", "PNG", "WEBP", "TIFF", "GIF"]))
def test_any_bytes_give_a_valid_orientation(content, kind):
    for start in (b"", b"\xff\xd8", encode(Image.new("L", (1, 1)), "PNG")[:33], b"RIFF\0\0\0\0WEBP"):
        assert read_orientation(start + content, kind) in TURNS


@given(st.data())
def test_a_damaged_tag_gives_a_valid_orientation(data):
    content = bytearray(encode(picture(), "JPEG", exif=exif(6)))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(2, 60))] = data.draw(st.integers(0, 255))
    assert read_orientation(bytes(content), "JPEG") in TURNS
