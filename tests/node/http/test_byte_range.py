"""The Range header: what is asked is what a slice gives, what is nonsense is ignored."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from datasvc.node.http.routes import UnsatisfiableRangeError, parse_range
from tests.support.fuzzing import counts_refusals

sizes = st.integers(0, 1000)


@given(size=sizes, first=st.integers(0, 1200), length=st.integers(1, 1200))
def test_first_and_last_byte_are_a_slice(size, first, length):
    content = bytes(size)
    if first >= size:
        with pytest.raises(UnsatisfiableRangeError):
            parse_range(f"bytes={first}-{first + length - 1}", size)
        return
    start, stop = parse_range(f"bytes={first}-{first + length - 1}", size)
    assert (start, stop - start) == (first, len(content[first : first + length]))


@given(size=sizes, first=st.integers(0, 1200))
def test_an_open_end_reaches_the_end(size, first):
    if first >= size:
        with pytest.raises(UnsatisfiableRangeError):
            parse_range(f"bytes={first}-", size)
    else:
        assert parse_range(f"bytes={first}-", size) == (first, size)


@given(size=sizes, length=st.integers(0, 1200))
def test_a_suffix_is_the_end_of_the_object(size, length):
    if min(size, length) == 0:
        with pytest.raises(UnsatisfiableRangeError):
            parse_range(f"bytes=-{length}", size)
    else:
        assert parse_range(f"bytes=-{length}", size) == (max(0, size - length), size)


@pytest.mark.parametrize(
    "header",
    [None, "", "bytes", "bytes=", "bytes=-", "bytes=5-3", "bytes=0-1,4-5", "items=0-1", "bytes=a-b", "bytes=1",
     "bytes=-1-2", "bytes=" + "9" * 5000 + "-", "bytes=٣-٤", "bytes=0x0-1", "0-5"],
)  # fmt: skip
def test_what_a_server_has_to_ignore_means_the_whole_object(header):
    assert parse_range(header, 100) is None


@counts_refusals(UnsatisfiableRangeError)
@given(header=st.text(max_size=30) | st.from_regex(r"bytes=[0-9,\- ]*", fullmatch=True), size=sizes)
@example(header="bytes=9-", size=5)
def test_no_header_at_all_gives_bytes_outside_the_object(header, size):
    found = parse_range(header, size)
    assert found is None or 0 <= found[0] < found[1] <= size
