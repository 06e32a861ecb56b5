"""Large JPEGs at a reduced scale: which windows, how much their pixels differ, and from what part of the file."""

import dataclasses
import io
import itertools
import warnings

import numpy as np
import pytest
import simplejpeg
from PIL import Image
from sklearn.datasets import load_sample_images

from datasvc.errors import ConfigError
from datasvc.loaders import DecodeConfig
from datasvc.loaders.decode import reduced
from datasvc.loaders.decode.jpeg_frame import JpegFrame
from datasvc.loaders.decode.pixels import CropDecoder, PixelFormat
from datasvc.loaders.decode.reduced import decode_reduced
from datasvc.loaders.decode.worker import ImageWorker, decode_window
from tests.support.odd_images import exif

PHOTOS = load_sample_images().images  # uint8[427, 640, 3]: a building of much detail, and a flower
SIZE = 16


def encode(image, kind="JPEG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **{"quality": 92} | options)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def photo(number=0, mode="RGB", **options):
    return encode(Image.fromarray(PHOTOS[number]).convert(mode), **options)


def draw_windows(width, height, lowest, count, seed=0):
    """Yield `(top, left), (height, width)` of windows whose sides are `lowest` or more."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        shape = rng.integers(lowest, (height, width), endpoint=True)
        yield rng.integers(0, (height, width) - shape, endpoint=True).tolist(), shape.tolist()


def decode(blob, start, shape, *, scale, backend="cpu", size=SIZE, box=None):
    worker = ImageWorker(PixelFormat("uint8", "NHWC"), size, backend=backend, framework="torch", decode_scale=scale)
    out = np.empty((size, size, 3), np.uint8)
    assert worker.decode(blob, start, shape, out, flip=False, box=box) is None
    return out.astype(int)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_reduced_photos_differ_by_less_than_a_level(orientation, mode):
    upright = (640, 427) if orientation < 5 else (427, 640)
    for number in range(2):
        blob = photo(number, mode, exif=exif(orientation))
        for start, shape in draw_windows(*upright, 128, 12, seed=number):
            box = (1.5, 2.25, shape[1] - 3.5, shape[0] - 0.75) if number else None
            # Pillow decodes whole images, so it reduces wherever there are enough pixels.
            found, full = (
                decode(blob, start, shape, scale=scale, backend="pillow", box=box) for scale in ("auto", "full")
            )
            assert np.abs(found - full).mean() < 1, (start, shape)


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 64, 224])
@pytest.mark.parametrize("subsampling", ["444", "420", "422", "440", "411"])
def test_the_smallest_windows_of_a_sharp_photo_differ_by_less_than_a_level(size, subsampling):
    tiled = np.tile(np.concatenate([PHOTOS[0], PHOTOS[0][::-1]]), (2, 3, 1))  # large enough, and as sharp
    blob = np.frombuffer(simplejpeg.encode_jpeg(tiled, quality=92, colorsubsampling=subsampling), np.uint8)
    is_uneven = subsampling in {"422", "440", "411"}
    side = reduced.smallest_reduced(size, is_uneven=is_uneven)
    starts = (np.linspace(0, length - side, 4, dtype=int).tolist() for length in tiled.shape[:2])
    for top, left in itertools.product(*starts):
        window = (top, left), (side, side)
        found = decode_reduced(blob, *window, size, decodes_windows=False)
        assert np.abs(found.astype(int) - decode_window(blob, *window, size)).mean() < 1, window
    assert decode_reduced(blob, (0, 0), (side - 1, side), size, decodes_windows=False) is None


@pytest.mark.parametrize(
    ("window", "options", "is_reduced"),
    [
        (((0, 0), (427, 640)), {}, True),
        (((0, 0), (427, 640)), {"orientation": 6}, False),  # too wide: upright, it is 427x640
        (((0, 0), (640, 427)), {"orientation": 6}, True),
        (((100, 100), (250, 300)), {}, True),
        (((0, 0), (127, 640)), {}, False),  # too few pixels for four times the output
        (((0, 0), (128, 640)), {}, True),
        (((290, 0), (130, 140)), {}, False),  # below many rows, which a decoder of windows passes over
        (((290, 0), (130, 140)), {"decodes_windows": False}, True),
        (((290, 0), (130, 140)), {"progressive": True}, True),
        (((8, 0), (140, 130)), {"orientation": 6}, False),  # at the bottom of the photo as stored
        (((8, 277), (240, 150)), {"orientation": 6}, True),
        (((0, 0), (428, 640)), {}, False),
        (((0, 0), (427, 640)), {"kind": "PNG"}, False),
        (((0, 0), (427, 640)), {"mode": "CMYK"}, False),
        (((0, 0), (427, 640)), {"mode": "L"}, True),
    ],
)
def test_a_scale_is_reduced_where_that_saves_time_and_leaves_enough_pixels(window, options, is_reduced):
    options = dict(options)
    settings = {"decodes_windows": options.pop("decodes_windows", True)}
    blob = photo(exif=exif(options.pop("orientation", 1)), **options)
    assert (decode_reduced(blob, *window, SIZE, **settings) is not None) == is_reduced


def test_a_photo_of_which_pillow_would_warn_is_left_to_the_decoder_at_full_size():
    blob = encode(Image.new("L", (10000, 9100), 90))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert decode_reduced(blob, (0, 0), (9100, 10000), SIZE) is None
        assert decode_reduced(blob, (0, 0), (8000, 10000), SIZE) is not None  # the rows below it do not count
    assert seen == []


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_blocks": 3}])
def test_the_file_is_read_only_down_to_the_window_and_its_pixels_are_the_same(options, monkeypatch):
    blob = photo(**options)
    windows = list(draw_windows(640, 427, 128, 20))
    found = [decode_reduced(blob, *window, SIZE, decodes_windows=False) for window in windows]
    heights = []
    monkeypatch.setattr(reduced, "_cut", lambda raw, frame, _: heights.append(frame.height) or raw)
    whole = [decode_reduced(blob, *window, SIZE, decodes_windows=False) for window in windows]
    assert np.array_equal(found, whole)
    assert heights == [427] * len(windows)


def test_damage_below_the_window_is_passed_over_and_damage_in_it_is_left_to_the_decoder_at_full_size():
    blob = photo()[: 9 * photo().size // 10]
    assert decode_reduced(blob, (0, 0), (200, 640), SIZE) is not None
    assert decode_reduced(blob, (0, 0), (427, 640), SIZE) is None


@pytest.mark.parametrize("orientation", range(2, 9))
def test_a_window_of_a_turned_photo_equals_that_of_a_decoder_that_turns_all_of_it(orientation):
    upright = (640, 427) if orientation < 5 else (427, 640)
    blob = photo(exif=exif(orientation))
    decoder = CropDecoder()
    codec = decoder._codec
    turning = codec.DecodeParams(apply_exif_orientation=True, color_spec=codec.SRGB)
    for (top, left), (height, width) in draw_windows(*upright, 1, 12, seed=orientation):
        expected = decoder._decode_window(blob, [left, top, left + width, top + height], turning).copy()
        assert np.array_equal(decoder.decode(blob, (top, left), (height, width)), expected)


def test_fill_bytes_before_a_marker_do_not_hide_the_frame():
    raw = photo(exif=exif(6)).tobytes()
    frame, filled = JpegFrame.of(memoryview(raw)), JpegFrame.of(memoryview(raw[:2] + b"\xff" + raw[2:]))
    assert filled == dataclasses.replace(frame, offset=frame.offset + 1)


def test_an_unknown_scale_is_refused():
    with pytest.raises(ConfigError, match="decode_scale is 'half'; expected one of auto, full"):
        DecodeConfig(decode_scale="half")
