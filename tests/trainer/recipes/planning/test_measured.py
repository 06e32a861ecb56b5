"""What a plan reads from the file of a profile."""

import dataclasses
import json

import pytest

from datasvc.errors import ConfigError
from datasvc.trainer.recipes.planning.measured import MeasuredStep, read_measured
from datasvc.trainer.recipes.planning.step_time import ComputeTimes
from datasvc.trainer.recipes.settings.config import TrainConfig
from tests.trainer.recipes.profiling.steps import EXAMPLE

CONFIG = TrainConfig(data="d@1", repo="r", name="n", vocabulary=64, model_option=("layers=2",), micro_batch=2)


def write(path, *, config=CONFIG, **changes):
    costs = dataclasses.replace(EXAMPLE, samples=6)
    effective = dataclasses.replace(config, model=config.model_or_default)
    profile = {"costs": dataclasses.asdict(costs), "config": effective.to_dict(), "message_s": 0.25} | changes
    path.write_text(json.dumps(profile))
    return str(path)


def test_times_are_those_of_one_sample(tmp_path):
    path = write(tmp_path / "profile.json")
    assert read_measured(path, CONFIG) == MeasuredStep(ComputeTimes(3.0 / 6, 6.0 / 6, 1.0), 2, 0.25)


def test_without_micro_batches_the_passes_are_those_of_the_batch(tmp_path):
    path = write(tmp_path / "profile.json", config=dataclasses.replace(CONFIG, micro_batch=None))
    assert read_measured(path, CONFIG).micro_batch == 6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "gpt2"}, "measured with model 'gpt', and the plan has 'gpt2'; give --model as it was measured"),
        ({"model_option": ("layers=3",)}, r"model_option \['layers=2'\].* give --model-option"),
        ({"precision": "bf16"}, "measured with precision 'fp32', and the plan has 'bf16'"),
        ({"vocabulary": 65}, "measured with vocabulary 64, and the plan has 65"),
    ],
)
def test_a_profile_of_another_training_is_refused(tmp_path, change, says):
    path = write(tmp_path / "profile.json")
    with pytest.raises(ConfigError, match=says):
        read_measured(path, dataclasses.replace(CONFIG, **change))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"costs": {}, "config": {}, "message_s": 1}'])
def test_a_file_that_is_no_profile_is_refused(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"is no profile: .* profile --json"):
        read_measured(str(path), CONFIG)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no profile"):
        read_measured(str(tmp_path / "missing"), CONFIG)


def test_token_data_have_a_gpt_and_images_a_small_network():
    assert CONFIG.model_or_default == "gpt"
    assert dataclasses.replace(CONFIG, vocabulary=None).model_or_default == "small-cnn"
    assert dataclasses.replace(CONFIG, model="vgg16").model_or_default == "vgg16"
