import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.profiling.predict.cluster import Cluster, Link
from datasvc.trainer.recipes.profiling.predict.predict import costs_on
from datasvc.trainer.recipes.profiling.predict.simulate import InputSystem, Training, jitter_of, simulate
from datasvc.trainer.recipes.profiling.predict.step_time import StepMode, step_time
from tests.trainer.recipes.profiling.steps import EXAMPLE, step_costs

NETWORK = Link(1e9, 1e-4)
ALONE = Cluster(1, NETWORK)


@given(step_costs(), st.sampled_from(StepMode), st.integers(1, 64), st.integers(1, 4))
def test_without_jitter_every_step_takes_what_the_closed_form_says(costs, mode, nodes, prefetch):
    costs = dataclasses.replace(costs, skew_s=0.0)
    cluster = Cluster(nodes, NETWORK, ranks_per_node=2)
    steps_s = simulate(Training(costs, cluster, mode=mode, prefetch=prefetch), steps=5)
    assert steps_s == pytest.approx([step_time(costs_on(costs, cluster), mode)] * 5, abs=1e-9)


@pytest.mark.parametrize("mode", StepMode)
def test_two_ranks_with_the_jitter_of_a_profile_take_what_was_profiled(mode):
    # Messages of 10, 20 and 30 bytes over 5 bytes/s: all-reduces of 2, 4 and 6 seconds.
    cluster = Cluster(2, Link(5.0))
    profiled = costs_on(dataclasses.replace(EXAMPLE, skew_s=1.0), cluster)
    jitter = jitter_of(profiled, 2)
    steps_s = simulate(Training(profiled, cluster, mode=mode, jitter=jitter), steps=4000, seed=1)
    assert steps_s.mean() == pytest.approx(step_time(profiled, mode), rel=0.015)


def test_jitter_leaves_the_mean_of_one_rank_s_steps():
    alone = dataclasses.replace(EXAMPLE, messages=())
    steps_s = simulate(Training(alone, ALONE, jitter=0.5), steps=5000, seed=2)
    assert steps_s.mean() == pytest.approx(step_time(alone, StepMode.OVERLAPPED), rel=0.02)


def test_equal_seeds_give_equal_steps():
    training = Training(EXAMPLE, Cluster(3, NETWORK), jitter=0.2)
    assert np.array_equal(simulate(training, steps=20, seed=5), simulate(training, steps=20, seed=5))
    assert not np.array_equal(simulate(training, steps=20, seed=5), simulate(training, steps=20, seed=6))


def test_stragglers_cost_more_the_more_ranks_there_are():
    means_s = [
        simulate(Training(EXAMPLE, Cluster(nodes, NETWORK), jitter=0.1), steps=200).mean()
        for nodes in (1, 2, 16, 4096)
    ]
    assert means_s == sorted(means_s)
    assert means_s[0] == pytest.approx(step_time(costs_on(EXAMPLE, ALONE), StepMode.OVERLAPPED), rel=0.02)


def test_an_origin_that_all_nodes_share_limits_them_until_their_caches_hold_the_data():
    from_origin = InputSystem(batch_bytes=10**6, data_bytes=10**9, cache_bytes=0, origin_bytes_per_s=1e6)
    # A node draws a batch a second, 64 of them; the origin serves one a second.
    training = Training(EXAMPLE, Cluster(64, NETWORK), samples_from=from_origin)
    assert simulate(training, steps=5) == pytest.approx([64.0] * 5)
    cached = dataclasses.replace(from_origin, cache_bytes=10**9)
    freed = dataclasses.replace(training, samples_from=cached)
    assert simulate(freed, steps=5).mean() == pytest.approx(
        step_time(costs_on(EXAMPLE, Cluster(64, NETWORK)), StepMode.OVERLAPPED)
    )
    first = dataclasses.replace(freed, samples_from=dataclasses.replace(cached, is_first_epoch=True))
    assert simulate(first, steps=5) == pytest.approx([64.0] * 5)


def test_nodes_that_share_caches_need_the_origin_for_what_none_of_them_holds():
    quarter = InputSystem(batch_bytes=10**6, data_bytes=10**9, cache_bytes=250 * 10**6, origin_bytes_per_s=1e6)
    shared = dataclasses.replace(quarter, shares_caches=True)
    pair, four = Cluster(2, NETWORK), Cluster(4, NETWORK)
    assert quarter.fetch_s(pair) == pytest.approx(2 * 0.75)
    assert shared.fetch_s(pair) == pytest.approx(2 * 0.5)
    assert shared.fetch_s(four) == pytest.approx(0.75 * 10**6 / NETWORK.bytes_per_s)


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(ConfigError, match="jitter is -1"):
        Training(EXAMPLE, ALONE, jitter=-1.0)
    with pytest.raises(ConfigError, match="prefetch is 0"):
        Training(EXAMPLE, ALONE, prefetch=0)
    with pytest.raises(ConfigError, match="steps is 0"):
        simulate(Training(EXAMPLE, ALONE), steps=0)
    with pytest.raises(ConfigError, match="expected data and a bandwidth above 0"):
        InputSystem(batch_bytes=1, data_bytes=0, cache_bytes=0, origin_bytes_per_s=1.0)
