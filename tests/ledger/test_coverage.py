"""What ranges do not cover exactly once, against a count of each position."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from datasvc.ledger import coverage
from datasvc.ledger.coverage import cover
from datasvc.ledger.strided_range import StridedRange
from tests.ledger.test_strided_range import COMBS, members


@given(
    ranges=st.lists(COMBS, max_size=6), start=st.integers(0, 40), length=st.integers(0, 120), chunk=st.integers(1, 9)
)
def test_never_and_repeated_are_those_of_a_count(ranges, start, length, chunk):
    counted = Counter(p for strided in ranges for p in members(strided))
    kept, coverage._CHUNK_RUNS = coverage._CHUNK_RUNS, chunk
    try:
        found = cover(ranges, start, start + length)
    finally:
        coverage._CHUNK_RUNS = kept
    for uneven, is_meant in ((found.never, lambda n: n == 0), (found.repeated, lambda n: n > 1)):
        expected = [p for p in range(start, start + length) if is_meant(counted[p])]
        assert sorted(p for strided in uneven.ranges for p in members(strided)) == expected
        assert uneven.count == len(expected)


def test_a_billion_samples_are_laid_out_by_one_lap():
    num_samples, ranks, batch = 1_200_000_000, 64, 128
    size = ranks * batch
    ranges = [StridedRange(0, num_samples, size, rank * batch, batch) for rank in range(ranks)]
    found = cover(ranges, 0, num_samples)
    assert (found.never.count, found.repeated.count) == (0, 0)
    found = cover(ranges[:5] + ranges[6:], 0, num_samples)
    assert found.never.ranges == [StridedRange(0, num_samples, size, 5 * batch, batch)]
    assert found.never.count == ranges[5].size


def test_no_more_than_a_thousand_places_are_kept_and_all_are_counted():
    ranges = [
        StridedRange(0, 100_000, 7, 0, 1),
        StridedRange(0, 100_000, 11, 0, 1),
        StridedRange(0, 100_000, 10_007, 1, 2),
    ]
    found = cover(ranges, 0, 100_000)
    held = {p for strided in ranges for p in strided.positions()}
    assert (len(found.never.ranges), found.never.count) == (1000, 100_000 - len(held))
