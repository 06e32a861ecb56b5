"""Combs against sets of their positions."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.ledger import strided_range
from datasvc.ledger.strided_range import (
    StridedRange,
    contiguous,
    cover,
    describe_positions,
    first_positions,
    split_runs,
)
from datasvc.order import Step, slice_step

COMBS = st.builds(
    lambda start, length, period, offset, tooth: StridedRange(start, start + length, period, offset % period, tooth),
    st.integers(0, 60),
    st.integers(0, 60),
    st.integers(1, 20),
    st.integers(0, 19),
    st.integers(0, 25),
)


def members(strided):
    return [p for p in range(strided.start, strided.stop) if (p - strided.offset) % strided.period < strided.length]


@given(strided=COMBS, start=st.integers(0, 130), length=st.integers(0, 130))
def test_a_strided_range_yields_its_positions_and_their_number(strided, start, length):
    assert list(strided.positions()) == members(strided)
    assert strided.size == len(members(strided))
    starts, stops = strided.runs()
    assert [p for span in zip(starts.tolist(), stops.tolist(), strict=True) for p in range(*span)] == members(strided)
    assert members(strided.clip(start, start + length)) == [
        p for p in members(strided) if start <= p < start + length
    ]


@given(positions=st.lists(st.integers(0, 30), max_size=12))
def test_runs_hold_the_positions_in_their_order(positions):
    assert [p for run in split_runs(positions) for p in members(run)] == positions


@given(ranges=st.lists(COMBS, max_size=4), count=st.integers(0, 20))
def test_the_first_positions_come_in_order(ranges, count):
    assert first_positions(ranges, count) == sorted(p for strided in ranges for p in members(strided))[:count]


@given(
    start=st.integers(0, 100),
    positions=st.sets(st.integers(0, 40)).map(sorted),
    beyond=st.integers(1, 10),
)
def test_any_positions_are_described_and_nothing_else(start, positions, beyond):
    values = np.array(positions, np.int64) + start
    ranges = describe_positions(start, start + 40 + beyond, values)
    assert [p for strided in ranges for p in members(strided)] == values.tolist()
    assert ranges[-1].stop == start + 40 + beyond


@given(
    world_size=st.integers(1, 7),
    batch_size=st.integers(1, 9),
    lanes=st.sampled_from([1, 2, 3, 4, 6, 12]),
    start=st.integers(0, 50),
    steps=st.integers(1, 6),
)
def test_what_a_rank_serves_in_a_row_of_steps_is_one_comb(world_size, batch_size, lanes, start, steps):
    """The law that keeps ledgers small."""
    size = world_size * batch_size
    for rank in range(world_size):
        one, served = None, []
        for number in range(steps):
            step = Step(start + number * size, start + (number + 1) * size, 10_000)
            positions, _ = slice_step(step, rank=rank, world_size=world_size, lanes=lanes)
            (strided,) = describe_positions(step.start, step.stop, positions)
            assert one is None or strided.continues(one)
            one = (
                strided
                if one is None
                else StridedRange(one.start, strided.stop, strided.period, strided.offset, strided.length)
            )
            served += positions.tolist()
        assert members(one) == served


@pytest.mark.parametrize(
    ("first", "then", "goes_on"),
    [
        (contiguous(0, 4), contiguous(4, 9), True),
        (contiguous(0, 4), contiguous(5, 9), False),
        (StridedRange(0, 8, 8, 2, 2), StridedRange(8, 16, 8, 2, 2), True),
        (StridedRange(0, 8, 8, 2, 2), StridedRange(8, 16, 8, 3, 2), False),
        (StridedRange(0, 8, 8, 2, 2), StridedRange(8, 16, 4, 2, 2), False),
    ],
)
def test_a_strided_range_continues_another_with_the_same_runs_where_that_ends(first, then, goes_on):
    assert then.continues(first) is goes_on


@given(
    ranges=st.lists(COMBS, max_size=6), start=st.integers(0, 40), length=st.integers(0, 120), chunk=st.integers(1, 9)
)
def test_never_and_repeated_are_those_of_a_count(ranges, start, length, chunk):
    counted = Counter(p for strided in ranges for p in members(strided))
    kept, strided_range._CHUNK_RUNS = strided_range._CHUNK_RUNS, chunk
    try:
        found = cover(ranges, start, start + length)
    finally:
        strided_range._CHUNK_RUNS = kept
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
