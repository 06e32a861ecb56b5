import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from datasvc.errors import BadSampleError
from datasvc.loaders.decode.worker import decode_window
from datasvc.shards.images.header import read_header
from tests.examples import examples
from tests.support.odd_images import (
    BLACK,
    HEIGHT,
    WIDTH,
    bad_images,
    encode,
    exif,
    picture,
    png_16,
    sixteen_bits,
    with_alpha,
    ycck,
)

PNG = encode(picture(), "PNG")


def whole(content):
    """Return a square picture's pixels as they are."""
    side = read_header(content).width
    return decode_window(content, (0, 0), (side, side), side).astype(int)


def square(mode="RGB"):
    return picture(48, 48).convert(mode)


@examples(50)
@given(st.data())
def test_a_window_is_cut_and_scaled_by_pillow(data):
    top, left = data.draw(st.integers(0, HEIGHT - 1)), data.draw(st.integers(0, WIDTH - 1))
    height, width = data.draw(st.integers(1, HEIGHT - top)), data.draw(st.integers(1, WIDTH - left))
    size = data.draw(st.integers(1, 70))
    found = decode_window(PNG, (top, left), (height, width), size)
    window = picture().crop((left, top, left + width, top + height))
    expected = np.asarray(window.resize((size, size), Image.Resampling.BILINEAR))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("turn", range(1, 9))
def test_windows_lie_in_the_upright_image(turn):
    back = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[turn]  # the transpose that undoes the turn
    stored = picture() if back is None else picture().transpose(Image.Transpose(back))
    content = encode(stored, "PNG", exif=exif(turn))
    found = decode_window(content, (5, 7), (30, 30), 30)
    assert np.array_equal(found, np.asarray(picture())[5:35, 7:37])


def test_the_result_is_written_where_it_is_wanted():
    batch = np.zeros((2, 16, 16, 3), np.uint8)
    decode_window(np.frombuffer(PNG, np.uint8), (0, 0), (HEIGHT, WIDTH), 16, out=batch[1])
    assert not batch[0].any()
    assert np.array_equal(batch[1], decode_window(PNG, (0, 0), (HEIGHT, WIDTH), 16))


@pytest.mark.parametrize("mode", ["L", "1", "P"])
def test_grey_and_palette_pixels_are_repeated_or_looked_up(mode):
    image = square(mode)
    assert np.array_equal(whole(encode(image, "PNG")), np.asarray(image.convert("RGB")))


def test_sixteen_bits_are_rounded_to_eight():
    colours, grey = sixteen_bits(square()), sixteen_bits(square("L"))
    found = whole(encode(Image.fromarray(grey), "PNG"))
    assert np.array_equal(found, np.rint(grey[..., None] / 257.0).astype(int).repeat(3, axis=2))
    assert np.abs(whole(png_16(colours)) - colours / 257.0).max() <= 1  # Pillow cuts the lower byte off


def test_of_transparent_pixels_the_colours_are_kept():
    pixels = np.asarray(square())
    palette = square().quantize(64)
    assert np.array_equal(whole(encode(with_alpha(square()), "PNG")), pixels)
    assert np.array_equal(whole(encode(with_alpha(square()), "WEBP", lossless=True, exact=True)), pixels)
    for transparency in (3, bytes(range(64))):
        content = encode(palette, "PNG", transparency=transparency)
        assert np.array_equal(whole(content), np.asarray(palette.convert("RGB")))


def test_cmyk_and_ycck_are_ink_on_white():
    image = square()
    inks = image.convert("CMYK")
    assert np.abs(whole(encode(inks, "JPEG", quality=98)) - np.asarray(image)).mean() < 2
    below_black = np.asarray(image).astype(float) * (255 - BLACK) / 255
    assert np.abs(whole(ycck(image)) - below_black).mean() < 3


def test_floats_count_from_0_to_1_and_nothing_is_made_of_what_is_no_number():
    values = np.linspace(-0.5, 1.5, 256, dtype=np.float32).reshape(16, 16)
    values[0, 0] = np.nan
    found = whole(encode(Image.fromarray(values), "TIFF"))[..., 0]
    assert np.array_equal(found, np.rint(np.clip(np.nan_to_num(values), 0, 1) * 255))


@pytest.mark.parametrize("name", bad_images())
def test_what_does_not_decode_is_a_bad_sample_with_its_reason(name):
    content, reason = bad_images()[name]
    with pytest.raises(BadSampleError, match=reason):
        decode_window(content, (0, 0), (10, 10), 8)


@pytest.mark.parametrize(
    ("start", "shape"), [((0, 0), (45, 10)), ((0, 51), (10, 10)), ((-1, 0), (10, 10)), ((0, 0), (0, 10))]
)
def test_a_window_beyond_the_image_is_refused(start, shape):
    with pytest.raises(BadSampleError, match="too small for its window"):
        decode_window(PNG, start, shape, 8)


def test_a_decompression_bomb_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", WIDTH * HEIGHT // 2 - 1)
    with pytest.raises(BadSampleError, match="decompression bomb"):
        decode_window(PNG, (0, 0), (10, 10), 8)


def test_no_program_is_started_for_what_a_file_claims_to_be():
    """Pillow hands PostScript to another program; such bytes are no image here."""
    with pytest.raises(BadSampleError, match="not an image"):
        decode_window(encode(picture(), "EPS"), (0, 0), (10, 10), 8)
