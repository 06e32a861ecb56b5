"""The simulator's command line: what it reads, refuses and prints. What it computes has tests of its own."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.profiling.predict.simulate import simulate
from tests.trainer.recipes.profiling.steps import EXAMPLE
from tools import simulate_training
from tools.simulate_training import describe, make_parser, run

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
        [sys.executable, "tools/simulate_training.py", "-"],
        cwd=ROOT,
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
