"""Damage that decoders repair is found, and no file that an encoder wrote is refused."""

import io
import random
import sys
from functools import cache

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from datasvc.errors import BadSampleError, ConfigError
from datasvc.shards.images.header import Reencoding, check_and_reencode, read_header
from datasvc.shards.images.jpeg_damage import decode_jpeg
from tests.samples import jpeg

ENCODINGS = {
    **{f"subsampling {number}": {"subsampling": number} for number in range(3)},
    **{f"progressive {number}": {"subsampling": number, "progressive": True} for number in range(3)},
    "optimized": {"optimize": True},
    "restart rows": {"restart_marker_rows": 1},
    "restart blocks": {"restart_marker_blocks": 3},
    "restart progressive": {"restart_marker_rows": 2, "progressive": True},
    "components of RGB": {"keep_rgb": True},
    **{f"quality {quality}": {"quality": quality} for quality in (1, 5, 30, 100)},
}


@cache
def photos():
    return [Image.fromarray(pixels) for pixels in load_sample_images().images]


def encode(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def scan_start(content):
    start = content.rindex(b"\xff\xda")
    return start + 2 + int.from_bytes(content[start + 2 : start + 4], "big")


def with_zeros(content, share=0.5, size=200):
    """Return a JPEG with zeros in its last scan, at a share of its length."""
    start = scan_start(content)
    place = start + int((len(content) - 2 - size - start) * share)
    return content[:place] + bytes(size) + content[place + size :]


@pytest.mark.parametrize("options", ENCODINGS.values(), ids=ENCODINGS)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_intact_photos_are_accepted(options, mode):
    if "keep_rgb" in options and mode != "RGB":
        pytest.skip("only for RGB")
    # TurboJPEG refuses CMYK with subsampled colours, so Pillow decodes it.
    is_supported = mode != "CMYK" or options.get("subsampling", 0) == 0
    for photo in photos():
        content = encode(photo.convert(mode), **options)
        for end in (b"", b"bytes after the end" * 100, bytes(1000)):
            assert decode_jpeg(content + end) == is_supported
        assert read_header(content, decode=True) == read_header(content)


@pytest.mark.parametrize("options", ENCODINGS.values(), ids=ENCODINGS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_flat_and_simple_pictures_are_accepted_though_their_code_is_mostly_zeros(options, mode):
    if "keep_rgb" in options and mode != "RGB":
        pytest.skip("only for RGB")
    stripes = np.zeros((1500, 700), np.uint8)
    stripes[:, ::8] = 255
    corners = np.zeros((1500, 700), np.uint8)
    corners[::8, ::8] = 255
    for pixels in (np.zeros_like(stripes), np.full_like(stripes, 255), stripes, stripes.T, corners, 255 - corners):
        assert decode_jpeg(encode(Image.fromarray(np.ascontiguousarray(pixels)).convert(mode), **options))


@pytest.mark.parametrize("size", [(1, 1), (7, 9), (16, 16), (250, 3)])
def test_small_images_and_those_of_our_generators_are_accepted(size):
    assert decode_jpeg(jpeg(*size))
    assert decode_jpeg(memoryview(encode(photos()[0].resize(size))))


def test_zeros_in_the_middle_are_found_though_pillow_decodes_them():
    for photo in photos():
        damaged = with_zeros(encode(photo))
        Image.open(io.BytesIO(damaged)).load()
        read_header(damaged)
        with pytest.raises(BadSampleError, match="does not decode: Corrupt JPEG data"):
            read_header(damaged, decode=True)


@pytest.mark.parametrize("subsampling", [0, 1])
def test_zeros_in_cmyk_are_found(subsampling):
    with pytest.raises(BadSampleError, match="Corrupt JPEG data"):
        decode_jpeg(with_zeros(encode(photos()[0].convert("CMYK"), subsampling=subsampling)))


def test_zeros_that_decode_without_a_warning_are_found():
    """The number of their blocks fits by chance: the decoder warns of nothing."""
    content = encode(photos()[0])
    messages = set()
    for number in range(60):
        with pytest.raises(BadSampleError) as raised:
            decode_jpeg(with_zeros(content, number / 60))
        messages.add(str(raised.value).rpartition(" at byte")[0])
    assert "does not decode: Corrupt JPEG data: 64 zero bytes" in messages


def test_fill_bytes_before_a_marker_hide_no_damage():
    content = with_zeros(encode(photos()[0]), 0)
    with pytest.raises(BadSampleError, match="Corrupt JPEG data: 64 zero bytes"):
        decode_jpeg(content[:2] + b"\xff\xff" + content[2:])


def test_a_cut_file_with_a_new_end_marker_is_found():
    content = encode(photos()[1])
    with pytest.raises(BadSampleError, match="premature end of data segment"):
        read_header(content[: len(content) // 2] + b"\xff\xd9", decode=True)


def test_a_new_encoding_does_not_hide_damage():
    damaged = with_zeros(encode(photos()[0]))
    settings = Reencoding(max_side=100)
    header, encoded = check_and_reencode(damaged, settings, decode=False)
    assert (max(header.width, header.height), read_header(encoded, decode=True)) == (100, header)
    with pytest.raises(BadSampleError, match="Corrupt JPEG data"):
        check_and_reencode(damaged, settings, decode=True)


def test_a_missing_decoder_is_no_damage(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    assert read_header(jpeg()).kind == "JPEG"
    with pytest.raises(ConfigError, match=r"needs simplejpeg, .*pip install '\.\[images\]'"):
        read_header(jpeg(), decode=True)


def test_what_libjpeg_turbo_does_not_support_is_left_to_another_decoder():
    assert not decode_jpeg(b"\xff\xd8\xff\xc9" + bytes(20))


def shares():
    """Return the share of damaged files that a check finds, by damage and encoding."""
    rng = random.Random(0)
    found = {}
    for name, mode, options in (
        ("4:2:0", "RGB", {}),
        ("4:4:4", "RGB", {"subsampling": 0, "quality": 95}),
        ("optimized", "RGB", {"optimize": True}),
        ("grey", "L", {}),
        ("restart markers", "RGB", {"restart_marker_rows": 1}),
        ("progressive", "RGB", {"progressive": True}),
        ("CMYK", "CMYK", {}),
    ):
        for kind in ("zero", "random"):
            outcomes = []
            for photo in photos():
                content = encode(photo.convert(mode), **options)
                start = content.index(b"\xff\xda") + 14
                for _ in range(100):
                    place = rng.randrange(start, len(content) - 202)
                    bad = bytes(200) if kind == "zero" else rng.randbytes(200)
                    try:
                        read_header(content[:place] + bad + content[place + 200 :], decode=True)
                        outcomes.append(False)
                    except BadSampleError:
                        outcomes.append(True)
            found[name, kind] = sum(outcomes) / len(outcomes)
    return found


@pytest.mark.slow
def test_most_damage_of_200_bytes_is_found():
    for (name, kind), share in shares().items():
        assert share >= (1 if kind == "zero" and name != "progressive" else 0.8), (name, kind)
