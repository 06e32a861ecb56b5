"""Who gets which positions of a round, beside a count of every batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.ledger.leases import Leases, choose_shares, plan_shares
from tests.examples import examples

speeds = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6)


@examples(200)
@given(speeds=speeds, steps=st.integers(1, 50))
def test_shares_are_whole_batches_in_proportion_to_speed(speeds, steps):
    total = steps * len(speeds)
    shares = plan_shares(total, speeds)
    assert sum(shares) == total
    assert min(shares) >= 1
    quotas = [total * speed / sum(speeds) for speed in speeds]
    if min(quotas) >= 1:
        assert all(abs(share - quota) < 1 for share, quota in zip(shares, quotas, strict=True))
    assert plan_shares(total, [speed * 8 for speed in speeds]) == shares
    assert sorted(shares) == [share for _, share in sorted(zip(speeds, shares, strict=True))]


def test_small_remainders_go_to_the_first_and_slow_replicas_get_one_batch():
    assert plan_shares(24, [4, 2, 1]) == (14, 7, 3)
    assert plan_shares(6, [1, 1, 1]) == (2, 2, 2)
    assert plan_shares(5, [1, 1, 1]) == (2, 2, 1)
    assert plan_shares(9, [1000, 1, 1]) == (7, 1, 1)


def test_shares_change_only_for_a_gain_of_a_tenth():
    assert choose_shares(24, [1.05, 0.97, 1.0], (8, 8, 8)) == (8, 8, 8)
    assert choose_shares(24, [1.4, 0.9, 0.7], (8, 8, 8)) == (11, 7, 6)
    assert choose_shares(24, [4.1, 2, 1.05], (14, 7, 3)) == (14, 7, 3)
    assert choose_shares(16, [1, 1], (8, 8, 8)) == (8, 8)  # of another number of replicas


@examples(150)
@given(data=st.data())
def test_the_step_of_each_position_and_the_batches_of_each_step_are_those_of_the_rounds(data):
    speeds_of = data.draw(st.lists(st.floats(0.1, 10), min_size=1, max_size=4))
    batch_size, per_replica, steps = (data.draw(st.integers(1, 4)) for _ in range(3))
    ranks = per_replica * len(speeds_of)
    leases = Leases(steps, plan_shares(steps * len(speeds_of), speeds_of))
    assert Leases.from_dict(leases.to_dict()) == leases
    num_samples = data.draw(st.integers(batch_size * ranks, 40 * batch_size * ranks))
    first = data.draw(st.integers(0, num_samples - batch_size * ranks))
    expected, position, step = {}, first, 0
    while (found := leases.next_round(position, num_samples, batch_size, ranks)) is not None:
        assert found.start == position
        for number in range(found.num_steps):
            batches = [found.batch_of(rank, number) for rank in range(ranks)]
            assert leases.round_of_step(step + number, first, num_samples, batch_size, ranks) == (found, number)
            assert [bool(batch) for batch in batches] == [number < found.share_of(rank) for rank in range(ranks)]
            expected |= {each: step + number for batch in batches for each in batch}
        position, step = found.stop, step + found.num_steps
    num_batches = (num_samples - first) // (batch_size * ranks)
    assert position == first + num_batches * batch_size * ranks
    assert leases.count_steps(num_batches) == step
    assert leases.round_of_step(step, first, num_samples, batch_size, ranks) is None
    assert sorted(expected) == list(range(first, position))
    expected |= dict.fromkeys(range(position, num_samples), step)  # a batch that is not full
    offsets = np.arange(num_samples - first)
    found_steps = leases.steps_of(offsets, num_batches, batch_size, ranks)
    assert found_steps.tolist() == [expected[first + offset] for offset in offsets.tolist()]


@pytest.mark.parametrize("leases", [{"steps": 2, "shares": [3, 2]}, {"steps": 1, "shares": [2, 0]}, {"steps": 1.0}])
def test_leases_that_do_not_add_up_are_refused(leases):
    with pytest.raises((ValueError, TypeError, KeyError)):
        Leases.from_dict(leases)
