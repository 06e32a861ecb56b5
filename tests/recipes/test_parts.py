from pathlib import Path

import numpy as np
import pytest
import torch

from datasvc.errors import ConfigError
from trainer.__main__ import parse_arguments
from trainer.recipes import random_state
from trainer.recipes.config import TrainConfig
from trainer.recipes.models import build_model
from trainer.recipes.profile import trace_path
from trainer.recipes.schedules import warmup_cosine

REQUIRED = {"data": "d@1", "repo": "r", "name": "m"}


def test_the_rate_rises_linearly_then_falls_along_a_cosine_to_zero():
    shape = {"epochs": 10, "warmup_epochs": 2, "peak": 0.4}
    assert [warmup_cosine(at, **shape) for at in (0.5, 1, 2)] == pytest.approx([0.1, 0.2, 0.4])
    assert warmup_cosine(6, **shape) == pytest.approx(0.2)
    assert warmup_cosine(10, **shape) == pytest.approx(0)
    assert warmup_cosine(11, **shape) == pytest.approx(0)
    assert warmup_cosine(0.1, epochs=1, warmup_epochs=0, peak=1.0) == pytest.approx(0.9755, abs=1e-4)


def test_every_setting_is_an_option():
    config = parse_arguments(
        [
            "--data",
            "d@2",
            "--repo",
            "s3://x",
            "--name",
            "m",
            "--scale",
            "0.5",
            "0.9",
            "--resize",
            "72",
            "--warmup-epochs",
            "0.5",
            "--cache",
            "/c",
        ]
    )
    assert (config.data, config.scale, config.resize, config.warmup_epochs) == ("d@2", (0.5, 0.9), 72, 0.5)
    assert parse_arguments(["--data", "d", "--repo", "r", "--name", "m"]) == TrainConfig(data="d", repo="r", name="m")


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": 0},
        {"learning_rate": float("nan")},
        {"momentum": -1.0},
        {"scale": (2.0, 3.0)},
        {"warmup_epochs": -1},
        {"resume": "maybe"},
        {"name": "Bad/Name"},
        {"device": "tpu"},
        {"profile": "/nowhere/at/all/trace.json"},
    ],
)
def test_settings_out_of_range_are_refused_before_anything_runs(change):
    with pytest.raises(ConfigError):
        TrainConfig(**{**REQUIRED, **change})


def test_an_unknown_model_says_which_there_are():
    with pytest.raises(ConfigError, match="small-cnn"):
        build_model("resnet-9000", 10)
    assert build_model("small-cnn", 10)(torch.zeros(2, 3, 64, 64)).shape == (2, 10)


def test_of_several_ranks_each_has_a_trace_of_its_own():
    assert trace_path("/x/trace.json", rank=0, num_ranks=1) == Path("/x/trace.json")
    paths = [trace_path("/x/trace.json", rank=rank, num_ranks=2) for rank in range(2)]
    assert paths == [Path("/x/trace.0.json"), Path("/x/trace.1.json")]


def test_random_states_go_on_where_they_were():
    import random

    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    random_state.seed_all(3)
    state = random_state.capture()
    first = draw()
    assert draw() != first
    random_state.reinstate(state)
    assert draw() == first
    random_state.seed_all(3)
    assert draw() == first
