"""Bandwidth caps: the law of the bucket, on a clock of its own."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.node.transfers.origins import TokenBucket
from datasvc.testing import FakeClock

asks = st.lists(st.tuples(st.floats(0, 10), st.integers(0, 5000)), min_size=1, max_size=30)


@given(asks=asks, rate=st.integers(1, 10_000))
def test_between_any_two_instants_no_more_than_burst_and_rate_passes(asks, rate):
    clock = FakeClock(100.0)
    bucket, burst = TokenBucket(rate, clock=clock), rate / 10
    granted = []
    for pause, num_bytes in asks:
        clock.advance(pause)
        granted.append((clock.now_s + bucket.reserve(num_bytes), num_bytes))
    for number, (start, first_bytes) in enumerate(granted):
        passed = 0
        for instant, num_bytes in granted[number:]:
            passed += num_bytes
            # One piece that is larger than the burst passes whole, after a wait for all of it.
            assert passed <= max(burst, first_bytes) + rate * (instant - start) + 1e-6 * rate * instant


@given(asks=asks, rate=st.integers(1, 10_000))
def test_callers_are_served_in_the_order_in_which_they_ask(asks, rate):
    clock = FakeClock(100.0)
    bucket = TokenBucket(rate, clock=clock)
    granted = []
    for pause, num_bytes in asks:
        clock.advance(pause)
        granted.append(clock.now_s + bucket.reserve(num_bytes))
    assert all(later >= earlier - 1e-6 for earlier, later in itertools.pairwise(granted))


def test_a_busy_bucket_passes_its_whole_rate():
    clock = FakeClock(100.0)
    bucket = TokenBucket(1000, clock=clock)
    waits = [bucket.reserve(500) for _ in range(10)]
    assert waits[-1] == pytest.approx((5000 - 100) / 1000)


def test_a_pause_saves_up_no_more_than_the_burst():
    clock = FakeClock(100.0)
    bucket = TokenBucket(1000, clock=clock)
    clock.advance(1e6)
    assert bucket.reserve(100) == 0
    assert bucket.reserve(100) == pytest.approx(0.1)
