"""What combs do not cover exactly once, against a count of each position."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from datasvc.ledger import coverage
from datasvc.ledger.coverage import cover
from datasvc.ledger.strided_range import StridedRange
from tests.ledger.test_strided_range import COMBS, members


@given(
    combs=st.lists(COMBS, max_size=6), start=st.integers(0, 40), length=st.integers(0, 120), chunk=st.integers(1, 9)
)
def test_never_and_repeated_are_those_of_a_count(combs, start, length, chunk):
    counted = Counter(p for comb in combs for p in members(comb))
    kept, coverage._CHUNK_TEETH = coverage._CHUNK_TEETH, chunk
    try:
        found = cover(combs, start, start + length)
    finally:
        coverage._CHUNK_TEETH = kept
    for uneven, is_meant in ((found.never, lambda n: n == 0), (found.repeated, lambda n: n > 1)):
        expected = [p for p in range(start, start + length) if is_meant(counted[p])]
        assert sorted(p for comb in uneven.combs for p in members(comb)) == expected
        assert uneven.count == len(expected)


def test_a_billion_samples_are_laid_out_by_one_lap():
    num_samples, ranks, batch = 1_200_000_000, 64, 128
    size = ranks * batch
    combs = [StridedRange(0, num_samples, size, rank * batch, batch) for rank in range(ranks)]
    found = cover(combs, 0, num_samples)
    assert (found.never.count, found.repeated.count) == (0, 0)
    found = cover(combs[:5] + combs[6:], 0, num_samples)
    assert found.never.combs == [StridedRange(0, num_samples, size, 5 * batch, batch)]
    assert found.never.count == combs[5].size


def test_no_more_than_a_thousand_places_are_kept_and_all_are_counted():
    combs = [
        StridedRange(0, 100_000, 7, 0, 1),
        StridedRange(0, 100_000, 11, 0, 1),
        StridedRange(0, 100_000, 10_007, 1, 2),
    ]
    found = cover(combs, 0, 100_000)
    held = {p for comb in combs for p in comb.positions()}
    assert (len(found.never.combs), found.never.count) == (1000, 100_000 - len(held))
