"""Streams of compressed files: what is whole is read, what is not is an error."""

import gzip
import io
import zlib

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from datasvc.shards.sources.common.streams import DECOMPRESSION_ERRORS, decompress, read_up_to, skip

PACK = {"gzip": gzip.compress, "zstd": zstandard.compress}
CONTENT = b"".join(number.to_bytes(4, "big") for number in range(100_000))


def unpacked(packed, compression="gzip"):
    with decompress(io.BytesIO(packed), compression) as stream:
        return stream.read()


@pytest.mark.parametrize("compression", PACK)
@given(members=st.lists(st.binary(max_size=300), min_size=1, max_size=4))
def test_any_number_of_members_is_read(compression, members):
    packed = b"".join(map(PACK[compression], members))
    assert unpacked(packed, compression) == b"".join(members)


def test_zlib_is_read_as_gzip_is():
    assert unpacked(zlib.compress(CONTENT)) == CONTENT


def test_an_empty_file_is_empty():
    assert unpacked(b"") == b""


@pytest.mark.parametrize("num_zeros", [1, 600_000])
def test_zeros_after_a_member_are_padding_and_a_file_of_zeros_is_damaged(num_zeros):
    zeros = bytes(num_zeros)
    assert unpacked(gzip.compress(b"a") + zeros) == b"a"
    assert unpacked(gzip.compress(b"a") + zeros + gzip.compress(b"b")) == b"ab"
    with pytest.raises(DECOMPRESSION_ERRORS):
        unpacked(zeros)


@pytest.mark.parametrize("compression", PACK)
def test_a_file_cut_off_anywhere_is_an_error(compression):
    packed = PACK[compression](CONTENT)
    for length in (1, 3, 20, len(packed) // 2, len(packed) - 1):
        with pytest.raises(DECOMPRESSION_ERRORS):
            unpacked(packed[:length], compression)


def test_flipped_bits_of_the_content_are_an_error():
    packed = bytearray(gzip.compress(CONTENT))
    for offset in range(10, len(packed), len(packed) // 20):
        packed[offset] ^= 1
        with pytest.raises(DECOMPRESSION_ERRORS):
            unpacked(bytes(packed))
        packed[offset] ^= 1


@given(content=st.binary(max_size=50), length=st.integers(0, 60))
def test_reading_and_skipping_end_with_the_stream(content, length):
    stream = io.BytesIO(content)
    assert read_up_to(stream, length) == content[:length]
    assert stream.read() == content[length:]
    stream.seek(0)
    assert skip(stream, length) == min(length, len(content))
    assert stream.read() == content[length:]
