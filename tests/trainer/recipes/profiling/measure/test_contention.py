import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.trainer.recipes.profiling.measure.measure import contention_of

num_threads = st.integers(1, 64)


@given(num_threads, num_threads, st.integers(1, 128))
def test_fairly_shared_processors_lose_what_does_not_fit_beside(num_training, num_beside, num_processors):
    """Against playing it: w = 1 second beside, while the team would need all its shares for as long as that takes."""
    alone = min(1.0, num_processors / num_training)
    beside = min(1.0, num_processors / (num_training + num_beside))
    takes_s = 1 / (num_beside * beside)
    lost_s = takes_s - takes_s * beside / alone
    assert contention_of(alone, beside, num_beside) == pytest.approx(lost_s, abs=1e-12)


@given(num_threads, num_threads, st.floats(0.01, 1))
def test_where_all_are_busy_a_second_beside_costs_a_second_by_the_processors_that_the_team_had(
    num_training, num_beside, alone
):
    processors = num_training * alone
    beside = processors / (num_training + num_beside)
    if beside < 1e-3:
        return
    assert contention_of(alone, beside, num_beside) == pytest.approx(1 / processors)


@given(st.floats(0, 1), st.floats(0, 1), num_threads)
def test_what_is_lost_is_never_negative_whatever_the_noise(alone, beside, num_beside):
    assert 0 <= contention_of(alone, beside, num_beside) <= 1e3
    assert contention_of(alone, alone, num_beside) == 0
