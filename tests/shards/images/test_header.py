import io

import numpy as np
import pytest
from PIL import Image

from datasvc.errors import BadSampleError
from datasvc.shards.images.header import is_plain_jpeg, read_header
from tests.samples import jpeg


def encoded(kind, mode="RGB", **options):
    buffer = io.BytesIO()
    Image.new(mode, (30, 20)).save(buffer, kind, **options)
    return buffer.getvalue()


def without_letters(content):
    """Number the components of an RGB JPEG from 1, as files of other encoders do."""
    frame, numbered_frame = b"R\x11\0G\x11\0B\x11\0", b"\1\x11\0\2\x11\0\3\x11\0"
    scan, numbered_scan = b"R\0G\0B\0", b"\1\0\2\0\3\0"
    assert frame in content
    assert scan in content
    return content.replace(frame, numbered_frame).replace(scan, numbered_scan)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF"])
def test_headers_of_common_formats_are_read(kind):
    header = read_header(encoded(kind), decode=True)
    assert (header.kind, header.width, header.height) == (kind, 30, 20)


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpegs_in_grey_and_ycbcr_are_plain(mode, progressive):
    assert is_plain_jpeg(encoded("JPEG", mode, progressive=progressive))


@pytest.mark.parametrize("change", [bytes, without_letters])
def test_a_jpeg_that_an_adobe_segment_marks_as_rgb_is_not_plain(change):
    content = change(encoded("JPEG", keep_rgb=True))
    assert b"Adobe" in content
    assert not is_plain_jpeg(content)
    assert read_header(content, decode=True) == read_header(content) == ("JPEG", 30, 20)


def test_an_adobe_segment_that_marks_ycbcr_leaves_a_jpeg_plain():
    content = without_letters(encoded("JPEG", keep_rgb=True))
    transform = content.index(b"Adobe") + 11
    assert content[transform] == 0
    assert is_plain_jpeg(content[:transform] + b"\1" + content[transform + 1 :])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_sizes_are_those_after_the_exif_rotation(kind):
    exif = Image.Exif()
    exif[0x0112] = 6
    header = read_header(encoded(kind, exif=exif.tobytes() if kind != "TIFF" else exif))
    assert (header.width, header.height) == (20, 30)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF"])
def test_an_image_cut_in_half_is_never_accepted(kind):
    generator = np.random.default_rng(1)
    buffer = io.BytesIO()
    Image.fromarray(generator.integers(0, 256, (60, 80, 3), np.uint8)).save(buffer, kind)
    with pytest.raises(BadSampleError):
        read_header(buffer.getvalue()[: len(buffer.getvalue()) // 2])


def test_the_end_marker_of_a_thumbnail_is_not_that_of_the_image():
    thumbnail = b"\xff\xe1" + (2 + len(jpeg())).to_bytes(2, "big") + jpeg()
    whole = jpeg(200, 150, quality=95)
    with_thumbnail = whole[:2] + thumbnail + whole[2:]
    read_header(with_thumbnail)
    with pytest.raises(BadSampleError):
        read_header(with_thumbnail[:-1000])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"<html>not found</html>", "not an image: the file starts with b'<html>"),
        (jpeg()[:-20], "does not decode"),
        (encoded("PNG")[:50], "does not decode|truncated"),
    ],
)
def test_what_does_not_decode_is_refused_with_its_reason(content, reason):
    with pytest.raises(BadSampleError, match=reason):
        read_header(content, decode=True) if content[:4] == b"\x89PNG" else read_header(content)


def test_a_full_decode_finds_what_the_header_does_not_show():
    damaged = encoded("PNG")
    damaged = damaged[:45] + bytes([damaged[45] ^ 0xFF]) + damaged[46:]
    read_header(damaged)
    with pytest.raises(BadSampleError, match="does not decode"):
        read_header(damaged, decode=True)


def test_padding_after_the_end_of_a_jpeg_is_accepted():
    assert read_header(jpeg() + b"\0" * 1000).kind == "JPEG"


def test_an_orientation_that_is_no_number_is_ignored():
    tags = b"MM\0*\0\0\0\x08" + b"\0\x01" + b"\x01\x12\0\x02\0\0\0\x02" + b"6\0\0\0" + b"\0\0\0\0"  # the text "6"
    header = read_header(encoded("JPEG", exif=b"Exif\0\0" + tags))
    assert (header.width, header.height) == (30, 20)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_only_quarter_turns_swap_width_and_height(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    header = read_header(encoded("JPEG", exif=exif.tobytes()))
    assert (header.width, header.height) == ((20, 30) if orientation >= 5 else (30, 20))


def test_an_image_of_absurd_size_is_a_bad_sample(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(BadSampleError, match="decompression bomb"):
        read_header(jpeg())
