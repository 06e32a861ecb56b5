import io

import pytest
from PIL import Image

from datasvc.errors import BadSampleError
from datasvc.shards.images import read_header
from tests.samples import jpeg


def encoded(kind, mode="RGB", **options):
    buffer = io.BytesIO()
    Image.new(mode, (30, 20)).save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF"])
def test_headers_of_common_formats_are_read(kind):
    header = read_header(encoded(kind), decode=True)
    assert (header.kind, header.width, header.height) == (kind, 30, 20)


def test_sizes_are_those_after_the_exif_rotation():
    exif = Image.Exif()
    exif[0x0112] = 6
    header = read_header(encoded("JPEG", exif=exif.tobytes()))
    assert (header.width, header.height) == (20, 30)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"<html>not found</html>", "no image: it starts with b'<html>"),
        (jpeg()[:-20], "truncated JPEG: no end marker"),
        (encoded("PNG")[:60], "does not decode|truncated"),
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
