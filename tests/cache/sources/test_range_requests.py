"""What to ask for next of a range: all of it once, in requests of a good length."""

from hypothesis import given
from hypothesis import strategies as st

from datasvc.cache.sources.range_requests import GATHERED_PARTS, PART_BYTES, STREAMED_PARTS, RangeRequests


def parts_of(spans, share):
    """The lengths in parts of all ranges that are left."""
    found = []
    while (span := spans.take(share)) is not None:
        assert not found or span[0] == found[-1][1]
        found.append(span)
    return [-(-(stop - start) // PART_BYTES) for start, stop in found]


def spans(num_bytes, most_parts=GATHERED_PARTS):
    return RangeRequests(0, num_bytes, most_parts)


def test_requests_are_long_where_objects_share_them_and_short_where_one_has_them_all():
    assert parts_of(spans(17 * PART_BYTES - 1), 16) == [1] * 17
    long = parts_of(spans(200 * PART_BYTES), 16)
    assert long == sorted(long, reverse=True)
    assert (long[0], long[-16:]) == (4, [1] * 16)
    assert parts_of(spans(16 * PART_BYTES), 1) == [4] * 4
    assert parts_of(spans(5 * PART_BYTES), 1) == [3, 2]
    assert parts_of(spans(1), 1) == [1]
    assert parts_of(RangeRequests(7, 7, GATHERED_PARTS), 1) == []


def test_a_stream_that_is_the_only_one_of_its_object_is_longer():
    assert parts_of(spans(16 * PART_BYTES, STREAMED_PARTS), 1) == [16]
    assert parts_of(spans(20 * PART_BYTES, STREAMED_PARTS), 1) == [10, 10]
    assert parts_of(spans(200 * PART_BYTES, STREAMED_PARTS), 16) == parts_of(spans(200 * PART_BYTES), 16)


@given(
    st.integers(0, 40 * PART_BYTES),
    st.integers(0, 40 * PART_BYTES),
    st.sampled_from([GATHERED_PARTS, STREAMED_PARTS]),
    st.lists(st.integers(1, 16), min_size=1),
)
def test_each_byte_of_a_range_is_requested_once_by_several_threads(start, length, most_parts, shares):
    spans, stop, found = RangeRequests(start, start + length, most_parts), start + length, []
    while (span := spans.take(shares[len(found) % len(shares)])) is not None:
        found.append(span)
    edges = [start, *(end for _, end in found)]
    assert [begin for begin, _ in found] == edges[:-1]
    assert edges[-1] == stop
    assert all(begin < end and (end % PART_BYTES == 0 or end == stop) for begin, end in found)
    assert all(end - begin <= most_parts * PART_BYTES for begin, end in found)
