import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.optimizers.schedules import RateSchedule, Shape, scale_rate, sgd_share

BATCHES = st.integers(1, 1 << 17)


@given(BATCHES, st.integers(1, 64))
def test_k_times_the_batch_has_k_times_the_rate_or_its_root(batch, k):
    def scaled(rule, of):
        return scale_rate(0.1, rule=rule, global_batch=of, reference_batch=256)

    assert scaled("linear", k * batch) == pytest.approx(k * scaled("linear", batch))
    assert scaled("sqrt", k * batch) == pytest.approx(k**0.5 * scaled("sqrt", batch))
    assert scaled("none", k * batch) == 0.1


def rates(schedule, *progress):
    return [schedule.rate_at(at) for at in progress]


def test_the_rate_rises_linearly_then_falls_along_a_cosine_to_zero():
    schedule = RateSchedule(peak=0.4, epochs=10, warmup_epochs=2)
    assert rates(schedule, 0.5, 1, 2, 6) == pytest.approx([0.1, 0.2, 0.4, 0.2])
    assert rates(schedule, 10, 11) == pytest.approx([0, 0])
    assert RateSchedule(peak=1.0, epochs=1).rate_at(0.1) == pytest.approx(0.9755, abs=1e-4)


def test_steps_hold_until_their_milestone():
    schedule = RateSchedule(peak=3.2, epochs=90, shape="step", milestones=((30, 0.1), (60, 0.01), (80, 0.001)))
    assert rates(schedule, 1, 29.99, 30, 59, 60, 80, 90) == pytest.approx(
        [3.2, 3.2, 0.32, 0.32, 0.032, 0.0032, 0.0032]
    )


def test_a_polynomial_falls_to_zero_by_its_power():
    schedule = RateSchedule(peak=32.0, epochs=90, shape="polynomial", power=2, warmup_epochs=10)
    assert rates(schedule, 5, 10, 50, 90) == pytest.approx([16, 32, 8, 0])


def test_the_warmup_ends_at_the_peak_and_the_decay_begins_there_and_leaves_the_last_step_a_rate():
    schedule = RateSchedule(peak=1.0, epochs=4, warmup_epochs=1, shape="polynomial", power=1)
    found = [schedule.rate_at(step / 2, after=(step + 1) / 2) for step in range(8)]
    assert found == pytest.approx([1 / 2, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert schedule.rate_at(0, after=4) == 1, "a step longer than the warm-up"


def test_the_last_step_before_a_milestone_still_has_the_rate_before_it():
    schedule = RateSchedule(peak=1.0, epochs=3, shape="step", milestones=((2, 0.1),))
    assert [schedule.rate_at(epoch, after=epoch + 1) for epoch in range(3)] == [1, 1, 0.1]


@given(
    st.sampled_from(get_args(Shape)),
    st.floats(0.01, 100),
    st.floats(0, 20),
    st.floats(0, 1),
    st.lists(st.floats(0, 25), min_size=2, max_size=30),
)
def test_after_its_warmup_no_schedule_rises_and_none_leaves_its_range(shape, peak, warmup, start, progress):
    milestones = ((5, 0.5), (15, 0.1)) if shape == "step" else ()
    schedule = RateSchedule(
        peak=peak, epochs=20, shape=shape, warmup_epochs=warmup, warmup_start=start * peak, milestones=milestones
    )
    assert all(0 <= schedule.rate_at(at) <= peak * (1 + 1e-9) for at in progress)
    after = sorted(at for at in progress if at >= warmup)
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(rates(schedule, *after)))


def test_the_rate_is_a_function_of_progress_alone_so_a_resize_does_not_show():
    schedule = RateSchedule(peak=1.0, epochs=4, warmup_epochs=1)
    by_four, by_one = [step / 4 for step in range(1, 17)], [float(step) for step in range(1, 5)]
    assert rates(schedule, *by_four)[3::4] == rates(schedule, *by_one)


@pytest.mark.parametrize("change", [{"shape": "step"}, {"shape": "step", "milestones": ((30, 0.1), (20, 0.01))}])
def test_a_schedule_that_is_none_is_refused(change):
    with pytest.raises(ConfigError):
        RateSchedule(peak=1.0, epochs=1, **change)


def test_a_run_goes_over_from_rmsprop_to_sgd_without_a_jump():
    assert sgd_share(0) == pytest.approx(0.5 * 2.718281828**-4)
    assert [sgd_share(at) for at in (10, 12.5, 30)] == pytest.approx([0.5, 1, 1])
    grid = [sgd_share(step / 100) for step in range(2000)]
    assert grid == sorted(grid)
    assert max(b - a for a, b in itertools.pairwise(grid)) < 0.0021  # a hundredth of an epoch at slope 1/5
