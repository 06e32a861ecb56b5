"""The simulator's command line: what it reads, refuses and prints. What it computes has tests of its own."""

import dataclasses
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError
from datasvc.planning.cluster import Cluster, Link
from datasvc.planning.prediction import costs_on
from datasvc.planning.step import StepMode, step_time
from tests.planning.examples import EXAMPLE, step_costs
from tests.support import warm_python
from tools import simulate_training
from tools.simulate_training import InputSystem, Training, describe, jitter_of, make_parser, run, simulate

ROOT = Path(__file__).parents[2]
PROFILE = {"costs": dataclasses.asdict(EXAMPLE), "world_size": 2, "message_s": 0.001, "prefetch": 3}


@pytest.fixture
def profile(tmp_path):
    def write(**changes):
        path = tmp_path / "profile.json"
        path.write_text(json.dumps({**PROFILE, **changes}))
        return str(path)

    return write


def rows_of(path, *options):
    return run(make_parser().parse_args([path, "--steps", "3", "--nodes", "1", "16", *options]))


def test_one_node_is_fully_efficient_and_more_are_less(profile):
    rows = rows_of(profile(), "--bandwidth", "1kB/s")
    assert [(row["num_nodes"], row["world_size"]) for row in rows] == [(1, 1), (16, 16)]
    assert rows[0]["efficiency"] == 1.0 > rows[1]["efficiency"]
    assert [line.split()[:2] for line in describe(rows).splitlines()[2:]] == [["1", "1"], ["16", "16"]]


def test_a_profile_of_one_rank_needs_to_be_told_how_unlike_ranks_are(profile):
    alone = profile(world_size=1)
    with pytest.raises(ConfigError, match="profile two or more, or say --jitter"):
        rows_of(alone)
    assert rows_of(alone, "--jitter", "0")[0]["jitter"] == 0.0


@pytest.mark.parametrize(
    "option",
    [("--data-size", "1GB"), ("--sample-size", "1kB"), ("--cache-size", "1GB"), ("--peers",), ("--first-epoch",)],
)
def test_what_says_nothing_without_an_origin_is_refused(profile, option):
    with pytest.raises(ConfigError, match=f"{option[0]} would do nothing"):
        rows_of(profile(), *option)


def test_an_origin_that_is_too_slow_limits_all_nodes(profile):
    fed = ("--origin", "1MB/s", "--data-size", "1GB", "--sample-size", "1MB")
    assert rows_of(profile(), "--jitter", "0", *fed)[1]["mean_s"] == pytest.approx(16.0)


def test_loaders_work_as_far_ahead_as_they_did_in_the_profile(profile, monkeypatch):
    seen = []
    monkeypatch.setattr(
        simulate_training,
        "simulate",
        lambda training, **kwargs: seen.append(training) or simulate(training, **kwargs),
    )
    rows_of(profile())
    assert {training.prefetch for training in seen} == {3}


@pytest.mark.parametrize("text", ["", "[]", '{"costs": {}}', json.dumps({**PROFILE, "costs": {"messages": []}})])
def test_what_is_no_profile_is_refused_without_a_traceback(text):
    done = subprocess.run(
        [warm_python.command(), "tools/simulate_training.py", "-"],
        cwd=ROOT,
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")


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
