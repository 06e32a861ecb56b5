"""The size of buckets that is chosen from the cost of an all-reduce, without ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.trainer.gradients.bucket_choice import AllReduceCost, choose_bucket_bytes, fit_cost, predict_end_s

MB = 1_000_000
# Twenty layers of 2 MB; the gradient of the last one is ready first, each of the others 5 ms after the one before.
SIZES = [2 * MB] * 20
READY = [0.005 * (19 - layer) for layer in range(20)]


def choose(alpha_s, beta_s, sizes=SIZES, ready=READY, max_bytes=1 << 30):
    return choose_bucket_bytes(AllReduceCost(alpha_s, beta_s), sizes, ready, max_bytes=max_bytes)


def end(alpha_s, beta_s, bucket_bytes, sizes=SIZES, ready=READY):
    cost, kinds = AllReduceCost(alpha_s, beta_s), [None] * len(sizes)
    return predict_end_s(cost, sizes, ready, kinds=kinds, bucket_bytes=bucket_bytes)


def test_messages_that_cost_nothing_to_begin_are_small_and_expensive_ones_are_merged():
    free, expensive = choose(0.0, 1e-9), choose(0.02, 1e-9)
    # Nothing but the last layer is left when the backward pass ends.
    assert end(0.0, 1e-9, free) == pytest.approx(READY[0] + 0.002, rel=0.03)
    assert expensive > 2 * free
    assert choose(10.0, 1e-9) == sum(SIZES)


def test_a_slow_link_that_never_idles_gets_few_messages_after_an_early_first_one():
    # The link needs longer for a layer than the backward pass: only the start of the first message matters.
    chosen = choose(0.001, 1e-8)
    assert end(0.001, 1e-8, chosen) <= min(end(0.001, 1e-8, bucket) for bucket in range(MB, 40 * MB, MB)) * 1.01


costs = st.floats(0, 0.05), st.floats(1e-11, 1e-7)
layers = st.lists(st.tuples(st.integers(1, 50 * MB), st.floats(0, 0.1)), min_size=1, max_size=30)


@given(*costs, layers, st.integers(1, 200 * MB))
def test_the_choice_is_within_its_limit_and_no_larger_one_is_predicted_to_end_much_earlier(
    alpha_s, beta_s, layers, limit
):
    sizes, ready = [size for size, _ in layers], [ready_s for _, ready_s in layers]
    chosen = choose(alpha_s, beta_s, sizes, ready, limit)
    assert 0 < chosen <= limit
    largest = min(limit, sum(sizes))
    assert end(alpha_s, beta_s, chosen, sizes, ready) <= end(alpha_s, beta_s, largest, sizes, ready) + 1e-12


@given(st.floats(1e-5, 1e-1), st.floats(1e-11, 1e-7))
def test_the_cost_is_found_from_times_that_follow_it_and_is_never_negative(alpha_s, beta_s):
    cost = AllReduceCost(alpha_s, beta_s)
    sizes = [4**power * 4096 for power in range(7)]
    found = fit_cost(sizes, [cost.seconds(size) for size in sizes])
    assert found.alpha_s == pytest.approx(alpha_s, rel=1e-3)
    assert found.beta_s == pytest.approx(beta_s, rel=1e-3, abs=1e-13)
    noisy = fit_cost([1000, 2000], [1.0, 0.5])
    assert noisy.alpha_s > 0
    assert noisy.beta_s == 0
